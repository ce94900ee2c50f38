"""Submit runs to the Slurm lab, and read their states and records."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.evidence import states_of
from jobs.hydra_entry import launch_on_slurm
from jobs.ledger import Entry
from jobs.records import attempts
from jobs.run_state import RunState
from jobs.slurm import Slurm
from jobs.submit.launch import Point
from tests.jobs.conftest import point

ROOT = Path(__file__).parents[2]
MAX_WAIT_S = 900.0
"""Longest wait for an event: a start that takes 9 s takes minutes on a busy machine."""


def slurm(*command: str, check: bool = True) -> str:
    """The output of a Slurm command."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0 or not check, f"{command}: {done.stderr}"
    return done.stdout


def dev_point(index: int, name: str, steps: int, **settings: Any) -> Point:
    """A run of the stand-in on the development cluster."""
    return point(
        index,
        f"trainer.experiment_name={name}",
        cluster={"name": "dev", "partition": "low", "grace_s": 60, "cpus_per_task": 1},
        trainer__experiment_name=name,
        trainer__total_training_steps=steps,
        **settings,
    )


class Sweep:
    """One launch with the stand-in worker."""

    def __init__(
        self,
        folder: Path,
        points: Sequence[Point],
        standin: str = "",
        setup: Sequence[str] = (),
        **options: Any,
    ) -> None:
        """Submit ``points``. ``standin`` are variables of the stand-in (``NAME=VALUE``), ``setup``
        further shell lines.
        """
        self.folder = folder
        self.ledger = folder.parent / "ledger.jsonl"
        settings = {
            "ledger": str(self.ledger),
            "timeout_min": 60,
            "signal_delay_s": 30,
            "setup": [
                f"export PYTHONPATH={ROOT} PLIMSOLL_WORKER_MODULE=tests.jobs.standin {standin}",
                *setup,
            ],
        }
        assert launch_on_slurm(points, {**settings, **options}, folder) == 0

    def entries(self) -> list[Entry]:
        """This sweep's runs."""
        return [entry for entry in ledger.read(self.ledger) if entry.sweep == self.folder.name]

    def entry(self, index: int) -> Entry:
        """The newest launch of one run."""
        return next(entry for entry in self.entries() if entry.name.endswith(f"/{index}"))

    def states(self) -> dict[str, RunState]:
        """The states of the runs, as ``jobs status`` shows them."""
        return states_of(self.entries(), Slurm(timeout_s=MAX_WAIT_S))


def state(entry: Entry) -> str:
    """The state of a run: PENDING, RUNNING, COMPLETED, ..."""
    return states_of([entry], Slurm(timeout_s=MAX_WAIT_S))[entry.run].state


def step(entry: Entry) -> int:
    """The number of steps that a run has logged; a repeated step counts twice."""
    path = Path(entry.run) / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def causes(entry: Entry) -> list[str]:
    """The causes of the ends of a run's attempts."""
    return [str(line["cause"]) for line in attempts(Path(entry.run))]


def wait(condition: Callable[[], Any], event: str, entry: Entry | None = None) -> None:
    """Wait until ``condition`` holds; the error names ``event`` and shows the run's logs."""
    deadline = time.monotonic() + MAX_WAIT_S
    while not condition():
        failed = entry is not None and "error" in causes(entry)
        if failed or time.monotonic() > deadline:
            raise AssertionError(
                f"waited {MAX_WAIT_S} s for {event}\n{_logs_text(entry) if entry else ''}"
            )
        time.sleep(0.2)


def _logs_text(entry: Entry) -> str:
    logs = [*Path(entry.script).glob("*log.out"), *Path(entry.run).glob("logs/*/*.log")]
    texts = [f"== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
    return "\n".join([str(attempts(Path(entry.run))), os.popen("squeue; sinfo").read(), *texts])
