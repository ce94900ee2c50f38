"""Submit runs to the lab and look at them."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.ledger import Entry
from jobs.records import attempts
from jobs.slurm import Slurm
from jobs.submit.hydra_entry import launch_on_slurm
from jobs.submit.launch import Point, states_of
from jobs.view.state import RunState
from tests.jobs.conftest import point

ROOT = Path(__file__).parents[2]
LONG_S = 900.0
"""Of a wait for what comes by itself: a start that takes 9 s takes minutes beside other work."""


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
        self, folder: Path, points: Sequence[Point], standin: str = "", **options: Any
    ) -> None:
        """``standin``: more of its variables."""
        self.folder, self.ledger = folder, folder.parent / "ledger.jsonl"
        settings = {
            "ledger": str(self.ledger),
            "timeout_min": 60,
            "signal_delay_s": 30,
            "setup": [
                f"export PYTHONPATH={ROOT} PLIMSOLL_WORKER_MODULE=tests.jobs.standin {standin}"
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
        """As ``jobs status`` sees them."""
        return states_of(self.entries(), Slurm(timeout_s=LONG_S))


def state(entry: Entry) -> str:
    """PENDING, RUNNING, COMPLETED, ..."""
    return states_of([entry], Slurm(timeout_s=LONG_S))[entry.run].state


def step(entry: Entry) -> int:
    """How many steps a run has logged; a repeated one counts twice."""
    path = Path(entry.run) / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def causes(entry: Entry) -> list[str]:
    """Why its attempts ended."""
    return [str(line["cause"]) for line in attempts(Path(entry.run))]


def wait(true: Callable[[], Any], what: str, entry: Entry | None = None) -> None:
    """Wait for a condition; on failure say what was waited for and what the run's logs hold."""
    end = time.monotonic() + LONG_S
    while not true():
        broken = entry is not None and "error" in causes(entry)
        if broken or time.monotonic() > end:
            raise AssertionError(
                f"waited {LONG_S} s for {what}\n{_evidence(entry) if entry else ''}"
            )
        time.sleep(0.2)


def _evidence(entry: Entry) -> str:
    logs = [*Path(entry.script).glob("*log.out"), *Path(entry.run).glob("logs/*/*.log")]
    texts = [f"== {path}\n{path.read_text(errors='replace')[-1500:]}" for path in logs]
    return "\n".join([str(attempts(Path(entry.run))), os.popen("squeue; sinfo").read(), *texts])
