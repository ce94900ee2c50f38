"""Start the ranks of a run on this machine and wait for their end.

One rank runs in this process. Several run as child processes of ``python -m trainer.worker
RUN_DIR``, each in a process group of its own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path
from typing import IO

from trainer.base import environment, rank_records, signals
from trainer.base.errors import EXIT_USER, UserError
from trainer.base.rank_info import ATTEMPT, SLURM_SWITCH
from trainer.base.run_folder import log_folder, new_attempt
from trainer.launch.rank_process import RankProcess
from trainer.launch.rank_run import LAUNCHED, take_error
from trainer.launch.screen import Screen
from trainer.launch.watch import RunResult, watch

WORKER_MODULE = "PLIMSOLL_WORKER_MODULE"
"""The module that is a rank; tests name a small one."""
SLURM_TASK_VARIABLES = {
    SLURM_SWITCH,
    "SLURM_PROCID",
    "SLURM_LOCALID",
    "SLURM_NODEID",
    "SLURM_NTASKS",
}
"""Variables of the Slurm task that the launcher may be."""


def run(config: object, run_dir: Path, ranks: int, attempt: int | None = None) -> int:
    """Run ``ranks`` ranks on this machine to their end and return the run's exit code.

    ``config`` was already frozen to ``<run_dir>/config.yaml``, which is all that a rank reads.
    ``attempt``: the number of an attempt whose log folder exists; None begins the next one. The
    code is that of the rank that failed first; 85 when the ranks saved and want to go on; 0 when
    all finished. Raises UserError for less than one rank.
    """
    if ranks < 1:
        raise UserError(
            f"trainer.n_gpus_per_node={ranks}: at least one process is needed; set it to 1 or more."
        )
    module = os.environ.get(WORKER_MODULE, "trainer.worker")
    if attempt is None:
        attempt = new_attempt(run_dir)
    if ranks == 1:
        os.environ[ATTEMPT] = str(attempt)
        environment.prepare(1)
        signals.install()
        return int(importlib.import_module(module).main(run_dir))
    screen = Screen(sys.stdout)
    processes = _start_ranks(module, run_dir, ranks, attempt, screen)
    result = watch(processes)
    if result.failed_rank is not None:
        # Take the errors of all ranks: each goes to its rank's log.
        errors = [take_error(process.log, process.end_file) for process in processes]
        _show_error(screen, result, processes[result.failed_rank], errors[result.failed_rank])
    return result.code


def _start_ranks(
    module: str, run_dir: Path, ranks: int, attempt: int, screen: Screen
) -> list[RankProcess]:
    # Every rank reads this pipe; only this process holds its write end, until it ends.
    read_end, write_end = os.pipe()
    processes: list[RankProcess] = []
    try:
        for rank in range(ranks):
            variables = _rank_environment(rank, ranks)
            variables[environment.PARENT_FD] = str(read_end)
            variables[ATTEMPT] = str(attempt)
            folder = log_folder(run_dir, attempt)
            processes.append(
                _start_rank([module, str(run_dir)], rank, variables, read_end, folder, screen)
            )
    except BaseException:
        for process in processes:
            process.kill()
        raise
    finally:
        os.close(read_end)
    processes[0].parent_pipe = write_end
    return processes


def _start_rank(
    arguments: list[str],
    rank: int,
    variables: dict[str, str],
    parent_pipe: int,
    folder: Path,
    screen: Screen,
) -> RankProcess:
    """Start one rank. Rank 0's output goes to the screen and its log, the others' to their logs."""
    log = folder / f"rank_{rank}.log"
    end_file = rank_records.end_file(folder, rank)
    end_file.unlink(missing_ok=True)
    variables = variables | {LAUNCHED: "1"}
    if rank == 0:
        variables |= screen.terminal_variables()
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    with open(descriptor, "ab") as output, signals.blocked():
        process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-m", *arguments],
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE if rank == 0 else output,
            stderr=subprocess.STDOUT,
            pass_fds=(parent_pipe,),
            process_group=0,
        )
    output_thread = screen.mirror(_output_of(process), log) if rank == 0 else None
    return RankProcess(rank, process, log, end_file, output_thread)


def _output_of(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdout is not None
    return process.stdout


def _rank_environment(rank: int, ranks: int) -> dict[str, str]:
    """The variables of a rank, whatever Slurm task the launcher is."""
    env = {
        key: value
        for key, value in os.environ.items()
        if key not in SLURM_TASK_VARIABLES and not key.startswith("SLURM_STEP_")
    }
    env.pop("MASTER_PORT", None)  # rank 0 binds one and publishes it in the run folder
    env |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "PYTHONUNBUFFERED": "1",
    }
    env |= environment.process_settings(env, ranks)
    if Path("/sys/class/net/lo").exists():
        # A host name that doesn't resolve must not stop a local run.
        env.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return env


def _show_error(screen: Screen, result: RunResult, failed: RankProcess, text: str) -> None:
    """Put the failing rank's error last on the screen."""
    if result.code != EXIT_USER:
        screen.line(
            f"Rank {failed.rank} failed first: {result.reason}. The other ranks were ended. Its "
            f"log: {failed.log}"
        )
    screen.line(text)
