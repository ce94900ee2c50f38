"""Interrupted runs on a real Slurm end where undisturbed ones do, bit for bit.

All scenes play at the same time, on nodes of their own; the tests then look at how each ended. The
real trainer goes through every kind of interruption once; ten preemptions in a row and a
cancellation fall to the quick stand-in.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from jobs import ledger
from jobs.ledger import Entry
from jobs.records import attempts
from tests.system import digits_reward
from tests.system.slurm_runs import Sweep, causes, dev_point, slurm, state, step, wait
from tests.system.test_slurm_sweep import Lab
from trainer.base.run_folder import log_folder, read_json, read_lines

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]
STEPS, STANDIN_STEPS, PREEMPTIONS = 24, 60, 10
A_STEP = 8
"""Answers of a step of the real trainer."""
SAME_EVERY_TIME = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "actor/lr",
)
INTERRUPTIONS = ["preempted", "signalled", "requeued", "timeout", "node_failure"]


@dataclass
class Scenes:
    """What plays, and the daemons it plays on."""

    root: Path
    lab: Path
    trainer: Lab
    players: dict[str, Future[Entry]]

    def ended(self, name: str) -> Entry:
        """The run's entry, once its scene is over."""
        return self.players[name].result(timeout=3500)


@pytest.fixture(scope="module")
def scenes(slurm_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenes]:
    root = tmp_path_factory.mktemp("interruptions")
    trainer = Lab(root)
    del trainer.env["PLIMSOLL_WORKER_MODULE"]
    stage = Scenes(root, slurm_lab, trainer, {})
    plays: dict[str, Callable[[Scenes], Entry]] = {
        "broken": _broken,
        "calm": _calm,
        "preempted": _preempt_often,
        "cancelled": _cancel,
    }
    with ThreadPoolExecutor(len(plays)) as pool:
        stage.players |= {name: pool.submit(play, stage) for name, play in plays.items()}
        yield stage


def _others(*nodes: str) -> str:
    return ",".join(node for node in ("n1", "n2", "n3", "n4") if node not in nodes)


def _trainer(
    stage: Scenes, name: str, reward: Path, *nodes: str, logger: str = "[console]"
) -> Entry:
    """Submit the real trainer through the command line."""
    stage.trainer.sweep(
        name,
        "container=none",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.logger={logger}",
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "data.val_max_samples=2",
        "data.num_workers=0",
        "trainer.plot_interval=1000",
        "trainer.checkpoint.save_freq=2",
        f'hydra.launcher.exclude="{_others(*nodes)}"',
        "hydra.launcher.resubmit=always",
        "trainer.n_gpus_per_node=1",
        "hydra.launcher.timeout_min=60",
        "hydra.launcher.signal_delay_s=580",
    )
    return next(e for e in ledger.read(stage.root / "ledger.jsonl") if e.sweep == name)


def _standin(stage: Scenes, name: str, node: str, steps: int, standin: str = "") -> Entry:
    sweep = Sweep(stage.root / name, [dev_point(0, name, steps)], standin, exclude=_others(node))
    return sweep.entry(0)


def _finish(entry: Entry) -> Entry:
    wait(lambda: state(entry) == "COMPLETED", f"the end of {entry.name}", entry)
    return entry


def _calm(stage: Scenes) -> Entry:
    return _finish(_trainer(stage, "calm", Path(digits_reward.__file__), "n3"))


def _broken(stage: Scenes) -> Entry:
    """Each attempt makes three steps and goes on when it is asked to stop: none ends before its
    interruption comes.
    """
    reward = digits_reward.held_copy(stage.root / "reward", 3 * A_STEP)
    entry = _trainer(stage, "broken", reward, "n1", "n2", logger="[console,wandb]")
    for number, interrupt in enumerate(
        (_preempt, _signal_twice, _requeue, _reach_the_limit, _lose_the_node)
    ):
        seen = step(entry)
        if interrupt is not _reach_the_limit:  # that one comes soon enough by itself
            wait(
                lambda seen=seen: step(entry) >= seen + 2,
                f"two steps before {interrupt.__name__}",
                entry,
            )
        interrupt(entry, stage.lab)
        wait(
            lambda number=number: len(causes(entry)) > number,
            f"the end of {interrupt.__name__}",
            entry,
        )
    reward.with_name("hold").unlink()
    return _finish(entry)


def _node_of(entry: Entry) -> str:
    number = len(attempts(Path(entry.run))) + 1
    return str(read_json(log_folder(Path(entry.run), number) / "begin.json")["nodes"])


def _preempt(entry: Entry, lab: Path) -> None:
    node = _node_of(entry)
    slurm(
        "sbatch",
        "-p",
        "high",
        "-w",
        node,
        "--exclusive",
        "-t",
        "1",
        "-o",
        "/dev/null",
        "--wrap",
        "true",
    )


def _signal_twice(entry: Entry, lab: Path) -> None:
    slurm("scancel", "--signal=USR2", entry.job)
    slurm(
        "scancel", "--signal=USR2", entry.job, check=False
    )  # as when a container runtime passes it on again


def _requeue(entry: Entry, lab: Path) -> None:
    """An operator's requeue: the ranks get TERM and nothing else, like on a site that sends no
    USR2.
    """
    slurm("scontrol", "requeue", entry.job)


def _reach_the_limit(entry: Entry, lab: Path) -> None:
    """Slurm's own time limit, sooner: with 580 s of warning before ten minutes it warns when it
    looks, every 30 s.
    """
    slurm("scontrol", "update", f"JobId={entry.job}", "TimeLimit=10")
    wait(lambda: causes(entry)[-1:] == ["timeout"], "the time limit", entry)
    slurm("scontrol", "update", f"JobId={entry.job}", "TimeLimit=60")


def _lose_the_node(entry: Entry, lab: Path) -> None:
    """The machine is gone: its daemon, and everything the job had on it. Slurm finds out by itself
    (SlurmdTimeout).
    """
    node, array = _node_of(entry), entry.job.split("_")[0]
    file = lab / f"pid/slurmd-{node}.pid"
    _kill(int(file.read_text()))
    for mark in (f"slurmstepd: [{array}.", f"SLURM_ARRAY_JOB_ID={array} "):
        for pid in [pid for pid, words in _processes() if mark in words]:
            _kill(pid)
    wait(
        lambda: "down" in slurm("sinfo", "-h", "-n", node, "-o", "%T"), f"the loss of {node}", entry
    )
    with (lab / f"log/slurmd-{node}.out").open(
        "ab"
    ) as log:  # a new machine of that name, for the tests that follow
        daemon = shutil.which("slurmd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        again = subprocess.Popen(
            [str(daemon), "-D", "-N", node], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    file.write_text(str(again.pid))


def _processes() -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                words = (
                    (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
                environment = (
                    (folder / "environ").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                )
            except OSError:
                continue
            found.append((int(folder.name), f"{words} {environment} "))
    return found


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _preempt_often(stage: Scenes) -> Entry:
    entry = _standin(stage, "preempted", "n4", STANDIN_STEPS, "STANDIN_HOLD_AFTER=5")
    for turn in range(PREEMPTIONS):
        before = step(entry)
        wait(
            lambda before=before: step(entry) >= before + 3,
            f"three steps before preemption {turn}",
            entry,
        )
        _preempt(entry, stage.lab)
        wait(
            lambda turn=turn: len(causes(entry)) > turn, f"preemption {turn} of {entry.name}", entry
        )
    (Path(entry.run) / "go").touch()
    return _finish(entry)


def _cancel(stage: Scenes) -> Entry:
    entry = _standin(stage, "cancelled", "n3", 100000)
    wait(lambda: step(entry) >= 10, "ten steps", entry)
    slurm("scancel", entry.job)
    seen: list[str] = []
    wait(lambda: seen.append(state(entry)) or seen[-1] == "CANCELLED", "the cancellation", entry)
    assert set(seen) <= {"RUNNING", "COMPLETING", "ENDING", "CANCELLED"}, seen  # never LOST
    return entry


def _metrics(entry: Entry) -> dict[int, dict[str, float]]:
    rows = [
        row for row in read_lines(Path(entry.run) / "metrics.jsonl") if "actor/grad_norm" in row
    ]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))  # none lost, none twice
    return {row["step"]: {name: row[name] for name in SAME_EVERY_TIME} for row in rows}


def _weights(entry: Entry) -> dict[str, torch.Tensor]:
    folder = Path(entry.run) / f"checkpoints/step_{STEPS}/global_step{STEPS}"
    tensors = torch.load(
        next(iter(folder.glob("*model_states.pt"))), map_location="cpu", weights_only=False
    )["module"]
    return dict(tensors)


def test_the_trainer_through_every_interruption_equals_the_undisturbed_run(scenes: Scenes) -> None:
    broken, calm = scenes.ended("broken"), scenes.ended("calm")
    assert causes(broken) == [*INTERRUPTIONS, "done"] and causes(calm) == ["done"]
    assert _metrics(broken) == _metrics(calm)
    assert any(row["actor/grad_norm"] > 0 for row in _metrics(calm).values())
    ours, theirs = _weights(broken), _weights(calm)
    assert ours.keys() == theirs.keys() and all(
        torch.equal(ours[name], theirs[name]) for name in ours
    )


def test_every_attempt_is_written_down(scenes: Scenes) -> None:
    run = Path(scenes.ended("broken").run)
    lines = attempts(run)
    for line in lines:
        assert line["nodes"] in ("n1", "n2") and line["gpu_s"] == line["wall_s"] > 0
        assert line["step_to"] > line["step_from"]
        assert (run / f"logs/attempt_{line['attempt']}/rank_0.log").exists()
    for before, after in pairwise(lines):
        lost = (
            before["exit_code"] is None
        )  # only then are steps since the last checkpoint done again
        assert (
            after["step_from"] <= before["step_to"]
            if lost
            else after["step_from"] == before["step_to"]
        )
        assert before["end"] <= after["start"] and before["requeue"]
    lost, last = lines[-2:]
    assert lost["nodes"] != last["nodes"] and lost["exit_code"] is None
    assert lost["end"] < last["start"]  # the wait in the queue is not charged to the lost attempt


def test_one_wandb_run_over_all_attempts_in_their_order(scenes: Scenes) -> None:
    broken = scenes.ended("broken")
    assert json.loads((Path(broken.run) / "wandb.json").read_text())["group"] == "broken"
    sync = scenes.trainer.command("jobs", "sync", "broken", "--dry-run").stdout.splitlines()
    assert len(sync) == len(INTERRUPTIONS) + 1
    assert ["--append" in line for line in sync] == [False, *[True] * len(INTERRUPTIONS)]
    assert len({line.rpartition("-")[2] for line in sync}) == 1


def test_ten_preemptions_in_a_row(scenes: Scenes) -> None:
    entry = scenes.ended("preempted")
    assert causes(entry) == ["preempted"] * PREEMPTIONS + ["done"]
    weights = ""
    for number in range(1, STANDIN_STEPS + 1):
        weights = hashlib.sha256(f"{weights}{number}".encode()).hexdigest()
    saved = json.loads((Path(entry.run) / "state_0.json").read_text())
    assert (saved["step"], saved["weights"]) == (STANDIN_STEPS, weights)
    lines = attempts(Path(entry.run))
    assert [line["step_from"] for line in lines[1:]] == [
        line["step_to"] for line in lines[:-1]
    ]  # no step twice


def test_a_cancelled_run_saves_and_stays_cancelled(scenes: Scenes) -> None:
    entry = scenes.ended("cancelled")
    assert causes(entry) == ["cancelled"]
    assert json.loads((Path(entry.run) / "state_0.json").read_text())["step"] >= 10
    assert (
        slurm(
            "squeue", "-h", "-j", entry.job.split("_")[0], "-t", "PENDING,RUNNING", check=False
        ).strip()
        == ""
    )
