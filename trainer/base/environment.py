"""The process environment before torch is imported, and this process's place among the ranks.

Imports nothing heavy: thread counts only count when they are set before torch loads its OpenMP
library.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from trainer.base.errors import UserError

SLURM_SWITCH = "PLIMSOLL_SLURM"
"""The payload sets this to 1 under srun. SLURM_* alone may come from an interactive allocation and
mean nothing.
"""
TERMINAL = "PLIMSOLL_TERMINAL"
"""1 when rank 0's output ends on a terminal, though it passes through the launcher's pipe."""
ROLLOUT_NODES = "PLIMSOLL_ROLLOUT_NODES"
"""How many of a job's nodes, its last ones, hold vLLM servers and no rank; the batch script sets
it.
"""
ATTEMPT = "PLIMSOLL_ATTEMPT"
"""The attempt's number, set by whatever starts the ranks."""
PARENT_FD = "PLIMSOLL_PARENT_FD"
"""A pipe whose other end only the launcher holds: it reads end-of-file when the launcher is
gone.
"""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Where this process stands. ``master_port`` is None when rank 0 has to choose and publish
    it.
    """

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int | None


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """Where a process stands that is no rank: on a node that only holds vLLM servers."""

    node: int
    """Of these nodes, from 0."""
    local_id: int
    tasks: int
    """Processes of the job on this node."""
    master_addr: str


def available_cores() -> int:
    """Cores this process may use: the affinity mask, cut down to the cgroup's CPU quota. At least
    1.
    """
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)
    )
    quota = _cgroup_quota(Path("/sys/fs/cgroup"))
    return max(1, min(cores, int(quota)) if quota is not None else cores)


def _cgroup_quota(root: Path) -> float | None:
    """CPUs that the cgroup (v2, then v1) grants, or None without a limit."""
    try:
        allowed, period = (root / "cpu.max").read_text().split()
        return None if allowed == "max" else int(allowed) / int(period)
    except (OSError, ValueError):
        pass
    try:
        allowed = (root / "cpu/cpu.cfs_quota_us").read_text()
        period = (root / "cpu/cpu.cfs_period_us").read_text()
        return int(allowed) / int(period) if int(allowed) > 0 else None
    except (OSError, ValueError):
        return None


def process_settings(env: Mapping[str, str], local_world_size: int) -> dict[str, str]:
    """What ``env`` lacks for one of ``local_world_size`` processes on this node. The user's own
    values win.

    OMP_WAIT_POLICY=PASSIVE because idle OpenMP threads that spin make a step ten times slower once
    another process wants the core. GOMP_SPINCOUNT lets them spin for some 50 us all the same: a
    small model's step is a tenth slower where they sleep between any two operations.
    """
    wanted = {
        "OMP_WAIT_POLICY": "PASSIVE",
        "OMP_NUM_THREADS": str(max(1, available_cores() // max(1, local_world_size))),
        "TOKENIZERS_PARALLELISM": "false",  # its threads and a forked data-loader worker deadlock
    }
    if env.get("OMP_WAIT_POLICY", "PASSIVE").upper() == "PASSIVE":
        wanted["GOMP_SPINCOUNT"] = "20000"
    return {key: value for key, value in wanted.items() if key not in env} | {
        "PATH": _path_with_own_bin(env)
    }


def _path_with_own_bin(env: Mapping[str, str]) -> str:
    """PATH with the interpreter's bin folder first, so that child processes find this environment's
    ninja.
    """
    own = os.path.dirname(sys.executable)
    rest = [p for p in env.get("PATH", os.defpath).split(os.pathsep) if p and p != own]
    return os.pathsep.join([own, *rest])


def prepare(
    local_world_size: int | None = None, env: MutableMapping[str, str] | None = None
) -> None:
    """Set up this process's environment; call it before torch is imported. Also ties its life to
    its launcher's.
    """
    env = os.environ if env is None else env
    ranks = (
        local_world_size
        if local_world_size is not None
        else rank_from_environment(env).local_world_size
    )
    env.update(process_settings(env, ranks))
    watch_parent(env)


def watch_parent(env: MutableMapping[str, str] | None = None) -> None:
    """If a launcher started this process: end its whole process group as soon as the launcher is
    gone.

    A thread reads the launcher's pipe, so it also ends a rank that is stuck in a collective (those
    release the GIL).
    """
    env = os.environ if env is None else env
    fd = env.pop(PARENT_FD, None)  # popped: grandchildren don't watch, they belong to the group
    if fd is None:
        return

    def watch() -> None:
        try:
            while os.read(int(fd), 1):
                pass
        except OSError:
            return  # not our pipe (someone copied the environment): nothing to watch
        os.killpg(os.getpgrp(), signal.SIGKILL)

    threading.Thread(target=watch, name="watch-parent", daemon=True).start()


def rank_from_environment(env: Mapping[str, str] | None = None) -> RankInfo:
    """This process's rank from RANK/WORLD_SIZE/..., else from SLURM_* when the payload asks for it,
    else one rank.

    Raises :class:`UserError` when a variable is missing, not a number, or out of range.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env:
        info = _from_launcher(env)
    elif env.get(SLURM_SWITCH) == "1":
        info = _from_slurm(env)
    else:
        return RankInfo(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=None,
        )
    if not (0 <= info.rank < info.world_size and 0 <= info.local_rank < info.local_world_size):
        raise UserError(
            f"The environment names rank {info.rank} of {info.world_size} (local rank "
            f"{info.local_rank} of "
            f"{info.local_world_size}): ranks count from 0. Unset RANK, WORLD_SIZE and LOCAL_RANK, "
            "or set them right."
        )
    return info


def _from_launcher(env: Mapping[str, str]) -> RankInfo:
    source = "set RANK, WORLD_SIZE and LOCAL_RANK together, or unset them all"
    world = _number(env, "WORLD_SIZE", source)
    rank = _number(env, "RANK", source)
    local_rank = _number(env, "LOCAL_RANK", source) if world > 1 or "LOCAL_RANK" in env else 0
    local_world = _number(env, "LOCAL_WORLD_SIZE", source) if "LOCAL_WORLD_SIZE" in env else world
    return RankInfo(
        rank=rank,
        world_size=world,
        local_rank=local_rank,
        local_world_size=local_world,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(env, "MASTER_PORT", source) if "MASTER_PORT" in env else None,
    )


def rollout_task(env: Mapping[str, str] | None = None) -> RolloutTask | None:
    """This process's place on a node that only holds servers; None for a rank.

    Raises :class:`UserError` as :func:`rank_from_environment` does.
    """
    env = os.environ if env is None else env
    if "RANK" in env or "WORLD_SIZE" in env or (aside := rollout_nodes(env)) == 0:
        return None
    node, per_node = _slurm_nodes(env)
    first = len(per_node) - aside
    if first < 1:
        raise UserError(
            f"{ROLLOUT_NODES}={aside} leaves none of the job's {len(per_node)} node(s) to train on."
        )
    if node < first:
        return None
    return RolloutTask(
        node=node - first,
        local_id=_number(env, "SLURM_LOCALID", _SRUN),
        tasks=per_node[node],
        master_addr=_slurm_master(env),
    )


def rollout_nodes(env: Mapping[str, str] | None = None) -> int:
    """How many nodes of this job hold servers only; 0 without Slurm."""
    env = os.environ if env is None else env
    return (
        _number(env, ROLLOUT_NODES, _SRUN)
        if env.get(SLURM_SWITCH) == "1" and ROLLOUT_NODES in env
        else 0
    )


def attempt_name(env: Mapping[str, str] | None = None) -> str | None:
    """A name that no other attempt of the run has; None where nothing has numbered this one."""
    env = os.environ if env is None else env
    if ATTEMPT not in env and "SLURM_JOB_ID" not in env:
        return None
    of_job = [env[k] for k in ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID") if k in env]
    return "-".join([f"attempt_{env.get(ATTEMPT, 0)}", *of_job])


_SRUN = (
    f"{SLURM_SWITCH}=1 wants a process started by srun; unset {SLURM_SWITCH} to run without Slurm"
)


def _from_slurm(env: Mapping[str, str]) -> RankInfo:
    node, per_node = _slurm_nodes(env)
    aside = per_node[len(per_node) - rollout_nodes(env) :]
    return RankInfo(
        rank=_number(env, "SLURM_PROCID", _SRUN),
        world_size=_number(env, "SLURM_NTASKS", _SRUN) - sum(aside),
        local_rank=_number(env, "SLURM_LOCALID", _SRUN),
        local_world_size=per_node[node] if node < len(per_node) else per_node[-1],
        master_addr=_slurm_master(env),
        master_port=_number(env, "MASTER_PORT", _SRUN) if "MASTER_PORT" in env else None,
    )


def _slurm_nodes(env: Mapping[str, str]) -> tuple[int, list[int]]:
    """This node's number, and the tasks of every node."""
    node = _number(env, "SLURM_NODEID", _SRUN) if "SLURM_NODEID" in env else 0
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    return node, tasks_per_node(tasks or str(_number(env, "SLURM_NTASKS", _SRUN)))


def _slurm_master(env: Mapping[str, str]) -> str:
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return env.get("MASTER_ADDR") or first_host(hosts)


def _number(env: Mapping[str, str], key: str, source: str) -> int:
    if key not in env:
        raise UserError(f"The environment variable {key} is not set: {source}.")
    try:
        return int(env[key])
    except ValueError:
        raise UserError(
            f"The environment variable {key}={env[key]!r} is not a whole number: {source}."
        ) from None


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-006,9],cpu1`` -> ``gpu003``."""
    head = re.match(r"[^,\[]*", nodelist)
    prefix = head.group(0) if head else nodelist
    rest = nodelist[len(prefix) :]
    while rest.startswith("["):
        inside, _, rest = rest[1:].partition("]")
        prefix += re.split(r"[,-]", inside)[0]
        tail = re.match(r"[^,\[]*", rest)
        prefix += tail.group(0) if tail else ""
        rest = rest[len(tail.group(0)) if tail else 0 :]
    return prefix


def tasks_per_node(text: str) -> list[int]:
    """Slurm's ``2(x3),1`` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts or [1]
