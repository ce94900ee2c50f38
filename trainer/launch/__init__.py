"""Start the ranks of a run on this machine, watch them, and end together.

One rank runs in this process. Several run as child processes of ``python -m trainer.worker
RUN_DIR``, each in a process group of its own. The launcher imports no torch.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from trainer.base import environment, signals
from trainer.base.errors import EXIT_USER, UserError
from trainer.base.run_folder import last_attempt, log_folder
from trainer.launch.report import ERROR_FILE, Screen, error_of, report_error
from trainer.launch.watch import Child, Verdict, watch

__all__ = ["new_attempt", "report_error", "run"]

WORKER_MODULE = "PLIMSOLL_WORKER_MODULE"
"""The module that is a rank (tests put a small one here)."""
OF_A_SLURM_RANK = {
    environment.SLURM_SWITCH,
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
}


def run(config: object, run_dir: Path, ranks: int, attempt: int | None = None) -> int:
    """Run ``ranks`` ranks on this machine to their end and return the run's exit code.

    ``config`` was already frozen to ``<run_dir>/config.yaml``, which is all that a rank reads.
    ``attempt``: whoever calls has made this attempt's log folder; None makes the next one. The code
    is that of the rank that failed first; 85 when the ranks saved and want to go on; 0 when all
    finished.
    """
    if ranks < 1:
        raise UserError(
            f"trainer.n_gpus_per_node={ranks}: at least one process is needed; set it to 1 or more."
        )
    module = os.environ.get(WORKER_MODULE, "trainer.worker")
    if ranks == 1:
        environment.prepare(1)
        signals.install()
        return int(importlib.import_module(module).main(run_dir))
    number, log_dir = (
        new_attempt(run_dir) if attempt is None else (attempt, log_folder(run_dir, attempt))
    )
    screen = Screen(sys.stdout)
    children = _start(module, run_dir, ranks, number, log_dir, screen)
    verdict = watch(children)
    if verdict.failed is not None:
        failed = children[verdict.failed]
        text = [error_of(c.log, c.error_file) for c in children][
            failed.rank
        ]  # of all: each goes to its rank's log
        _tell(screen, verdict, failed, text)
    return verdict.code


def new_attempt(run_dir: Path) -> tuple[int, Path]:
    """The number of this attempt (1, 2, ...) and its new log folder ``<run>/logs/attempt_N``."""
    logs = run_dir / "logs"
    logs.mkdir(mode=0o700, parents=True, exist_ok=True)
    number = 1 + last_attempt(run_dir)
    while True:
        try:
            log_folder(run_dir, number).mkdir(mode=0o700)
            return number, log_folder(run_dir, number)
        except FileExistsError:
            number += 1


def _start(
    module: str, run_dir: Path, ranks: int, attempt: int, log_dir: Path, screen: Screen
) -> list[Child]:
    read_end, write_end = (
        os.pipe()
    )  # every child reads it; only this process holds the write end, for its whole life
    children: list[Child] = []
    try:
        for rank in range(ranks):
            log = log_dir / f"rank_{rank}.log"
            error_file = log_dir / f"rank_{rank}.error"
            error_file.unlink(missing_ok=True)
            env = _child_environment(rank, ranks) | {
                environment.PARENT_FD: str(read_end),
                ERROR_FILE: str(error_file),
                "PLIMSOLL_ATTEMPT": str(attempt),
            }
            if rank == 0:
                env |= screen.terminal()
            with (
                open(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as out,
                signals.held(),
            ):
                process: subprocess.Popen[bytes] = subprocess.Popen(
                    [sys.executable, "-m", module, str(run_dir)],
                    env=env,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE if rank == 0 else out,
                    stderr=subprocess.STDOUT,
                    pass_fds=(read_end,),
                    process_group=0,
                )
            pump = screen.mirror(_pipe(process), log) if rank == 0 else None
            children.append(Child(rank, process, log, error_file, pump))
    except BaseException:
        for child in children:
            child.kill()
        raise
    finally:
        os.close(read_end)
    children[0].keep_open = write_end
    return children


def _pipe(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _child_environment(rank: int, ranks: int) -> dict[str, str]:
    env = dict(os.environ)
    for leaked in [k for k in env if k in OF_A_SLURM_RANK or k.startswith("SLURM_STEP_")]:
        del env[leaked]  # these ranks are ours, whatever task the launcher happens to be
    env.pop("MASTER_PORT", None)  # rank 0 binds one and publishes it in the run folder
    env.update(
        RANK=str(rank),
        WORLD_SIZE=str(ranks),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(ranks),
        MASTER_ADDR="127.0.0.1",
        PYTHONUNBUFFERED="1",
    )
    env.update(environment.process_settings(env, ranks))
    if Path("/sys/class/net/lo").exists():
        env.setdefault(
            "GLOO_SOCKET_IFNAME", "lo"
        )  # a host name that resolves nowhere must not stop a local run
    return env


def _tell(screen: Screen, verdict: Verdict, failed: Child, text: str) -> None:
    """Put the failing rank's error last on the screen."""
    if verdict.code == EXIT_USER:
        screen.line(text)
        return
    screen.line(
        f"Rank {failed.rank} failed first: {verdict.reason}. The other ranks were ended. Its log: "
        f"{failed.log}"
    )
    screen.line(text)
