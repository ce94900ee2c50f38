"""The environment of a process, set up before torch is imported.

Thread counts only take effect when they are set before torch loads its OpenMP library, so this
module imports nothing heavy.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from trainer.base.rank_info import rank_from_environment

TERMINAL = "PLIMSOLL_TERMINAL"
"""1 when rank 0's output ends on a terminal, though it passes through the launcher's pipe."""
PARENT_FD = "PLIMSOLL_PARENT_FD"
"""A pipe whose other end only the launcher holds: it reads end-of-file when the launcher is
gone.
"""


def prepare(
    local_world_size: int | None = None, env: MutableMapping[str, str] | None = None
) -> None:
    """Set up this process's environment, and end it when its launcher ends.

    Call it before torch is imported. ``local_world_size``: processes on this node; None takes it
    from the rank's variables, which raises UserError when these are wrong.
    """
    env = os.environ if env is None else env
    if local_world_size is None:
        local_world_size = rank_from_environment(env).local_world_size
    env.update(process_settings(env, local_world_size))
    watch_parent(env)


def process_settings(env: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """The variables that ``env`` lacks for one of ``local_world_size`` processes on this node.

    The user's own values win. OMP_WAIT_POLICY=PASSIVE because idle OpenMP threads that spin make a
    step ten times slower once another process wants the core. GOMP_SPINCOUNT lets them spin for
    some 50 us all the same: a small model's step is a tenth slower where they sleep between any two
    operations.
    """
    threads = max(1, available_cores() // max(1, local_world_size))
    defaults = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",  # its threads and a forked data-loader worker deadlock
    }
    if env.get("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        defaults["GOMP_SPINCOUNT"] = "20000"
    settings = {key: value for key, value in defaults.items() if key not in env}
    settings["PATH"] = _path_with_interpreter(env)
    return settings


def available_cores() -> int:
    """Cores this process may use, at least 1: its affinity mask, or the cgroup's CPU quota where
    that is less.
    """
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    if quota is not None:
        cores = min(cores, int(quota))
    return max(1, cores)


def watch_parent(env: MutableMapping[str, str] | None = None) -> None:
    """End this process's whole group as soon as the launcher that started it is gone.

    A thread reads the launcher's pipe, so it also ends a rank that is stuck in a collective, since
    those release the GIL. Does nothing without a launcher.
    """
    env = os.environ if env is None else env
    # Removed, since child processes don't watch: they belong to this process's group.
    descriptor = env.pop(PARENT_FD, None)
    if descriptor is not None:
        thread = threading.Thread(
            target=_kill_group_at_end_of_file,
            args=(int(descriptor),),
            name="watch-parent",
            daemon=True,
        )
        thread.start()


def _kill_group_at_end_of_file(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        return  # not the launcher's pipe: the environment was copied from another process
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _path_with_interpreter(env: Mapping[str, str]) -> str:
    """PATH with the interpreter's bin folder first, so that child processes find this environment's
    ninja.
    """
    interpreter = os.path.dirname(sys.executable)
    folders = env.get("PATH", os.defpath).split(os.pathsep)
    others = [folder for folder in folders if folder and folder != interpreter]
    return os.pathsep.join([interpreter, *others])


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the cgroup (version 2, then 1) grants; None without a limit."""
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:
        quota = (root / "cpu/cpu.cfs_quota_us").read_text()
        period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(quota) / int(period) if int(quota) > 0 else None
    except (OSError, ValueError):
        return None
