"""Interrupted runs on a real Slurm end where uninterrupted ones do.

All scenarios run at the same time, each on nodes of its own; the tests then look at how each ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from jobs.ledger import Entry
from jobs.records import attempts, read_json
from tests.system.slurm_runs import Sweep, causes, dev_point, slurm, state, step, wait

pytestmark = pytest.mark.system
STEPS = 200
PREEMPTIONS = 10


@dataclass
class Scenes:
    """The runs, and what drives them."""

    entries: dict[str, Entry]
    drivers: dict[str, Future[None]]

    def ended(self, name: str) -> Entry:
        """The run's entry, once its driver is through."""
        self.drivers[name].result(timeout=400)
        return self.entries[name]


@pytest.fixture(scope="module")
def scenes(slurm_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    root = tmp_path_factory.mktemp("interruptions")
    # name -> (node, steps, time limit in minutes, driver)
    plan: dict[str, tuple[str, int, int, Callable[[Entry, Path], None]]] = {
        "calm": ("n3", STEPS, 10, _finish),
        "preempted": ("n1", STEPS * 5, 10, _preempt_often),
        "node": ("n2,n4", STEPS * 2, 10, _kill_slurmd),
        "signal": ("n3", STEPS, 10, _signal),
        "requeue": ("n3", STEPS, 10, _requeue),
        "limit": ("n3", 1300, 1, _finish),
        "cancel": ("n3", 100000, 10, _cancel),
    }
    entries: dict[str, Entry] = {}
    for index, (name, (nodes, steps, minutes, _)) in enumerate(plan.items()):
        allowed = set(nodes.split(","))
        others = ",".join(node for node in ("n1", "n2", "n3", "n4") if node not in allowed)
        sweep = Sweep(root / name, [dev_point(index, name, steps)], exclude=others, timeout_min=minutes)
        entries[name] = sweep.entry(index)
    with ThreadPoolExecutor(len(plan)) as pool:
        yield Scenes(entries, {name: pool.submit(plan[name][3], entries[name], slurm_lab) for name in plan})


def _running_at(entry: Entry, at: int, seconds: float = 90) -> None:
    wait(lambda: step(entry) >= at, seconds, f"step {at} of {entry.name}", entry)


def _finish(entry: Entry, lab: Path | None = None) -> None:
    wait(lambda: state(entry) == "COMPLETED", 300, f"the end of {entry.name}", entry)


def _preempt_often(entry: Entry, lab: Path) -> None:
    for turn in range(PREEMPTIONS):
        before = step(entry)
        _running_at(entry, before + 5)
        slurm("sbatch", "-p", "high", "-w", "n1", "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "true")
        wait(lambda seen=turn: len(attempts(Path(entry.run))) > seen, 60, f"preemption {turn} of {entry.name}", entry)
    _finish(entry)


def _kill_slurmd(entry: Entry, lab: Path) -> None:
    _running_at(entry, 30)
    node = read_json(Path(entry.run) / "logs/attempt_1/begin.json")["nodes"]
    # The machine is gone: its daemon, and everything the job had on it. Only processes of this lab and this run.
    pids = [int((lab / f"pid/slurmd-{node}.pid").read_text())]
    array = entry.job.split("_")[0]
    for pid in pids:
        _kill(pid)
    for mark in (f"slurmstepd: [{array}.", f"SLURM_ARRAY_JOB_ID={array} "):
        for pid in [pid for pid, words in _processes() if mark in words]:
            _kill(pid)
    slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=test")
    _finish(entry)


def _processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                environment = (folder / "environ").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            except OSError:
                continue
            found.append((int(folder.name), f"{words} {environment} "))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _signal(entry: Entry, lab: Path) -> None:
    _running_at(entry, 30)
    slurm("scancel", "--signal=USR2", entry.job)
    slurm("scancel", "--signal=USR2", entry.job, check=False)  # as when a container runtime passes it on again
    _finish(entry)


def _requeue(entry: Entry, lab: Path) -> None:
    """An operator's requeue: the ranks get TERM and nothing else, like on a site that sends no USR2."""
    _running_at(entry, 30)
    slurm("scontrol", "requeue", entry.job)
    _finish(entry)


def _cancel(entry: Entry, lab: Path) -> None:
    _running_at(entry, 30)
    slurm("scancel", entry.job)
    wait(lambda: state(entry) == "CANCELLED", 60, f"the cancellation of {entry.name}", entry)


def _weights(entry: Entry) -> tuple[int, str]:
    saved = json.loads((Path(entry.run) / "state_0.json").read_text())
    return saved["step"], saved["weights"]


def _expected(steps: int) -> tuple[int, str]:
    import hashlib

    weights = ""
    for number in range(1, steps + 1):
        weights = hashlib.sha256(f"{weights}{number}".encode()).hexdigest()
    return steps, weights


def test_an_uninterrupted_run(scenes: Scenes) -> None:
    entry = scenes.ended("calm")
    assert causes(entry) == ["done"] and _weights(entry) == _expected(STEPS)


def test_ten_preemptions_in_a_row(scenes: Scenes) -> None:
    entry = scenes.ended("preempted")
    assert causes(entry) == ["preempted"] * PREEMPTIONS + ["done"]
    assert _weights(entry) == _expected(STEPS * 5)
    lines = attempts(Path(entry.run))
    assert [line["step_from"] for line in lines[1:]] == [line["step_to"] for line in lines[:-1]]  # no step twice
    assert all((Path(entry.run) / f"logs/attempt_{n}/rank_0.log").exists() for n in range(1, PREEMPTIONS + 2))


def test_a_lost_node(scenes: Scenes) -> None:
    entry = scenes.ended("node")
    assert causes(entry) == ["node_failure", "done"] and _weights(entry) == _expected(STEPS * 2)
    first, second = attempts(Path(entry.run))
    assert first["nodes"] != second["nodes"]


def test_a_signal_sent_twice(scenes: Scenes) -> None:
    entry = scenes.ended("signal")
    assert causes(entry) == ["signalled", "done"] and _weights(entry) == _expected(STEPS)


def test_an_operators_requeue_sends_only_term(scenes: Scenes) -> None:
    entry = scenes.ended("requeue")
    assert causes(entry) == ["requeued", "done"] and _weights(entry) == _expected(STEPS)
    assert "TERM" in (Path(entry.run) / "exit.json").read_text()


def test_the_time_limit(scenes: Scenes) -> None:
    entry = scenes.ended("limit")
    assert set(causes(entry)[:-1]) == {"timeout"} and causes(entry)[-1] == "done"
    assert _weights(entry) == _expected(1300)


def test_a_cancelled_run_saves_and_stays_cancelled(scenes: Scenes) -> None:
    entry = scenes.ended("cancel")
    assert causes(entry) == ["cancelled"]
    assert _weights(entry)[0] >= 30
    assert slurm("squeue", "-h", "-j", entry.job.split("_")[0], "-t", "PENDING,RUNNING", check=False).strip() == ""
    assert subprocess.run(["squeue", "--version"], capture_output=True, timeout=10, check=False).returncode == 0
