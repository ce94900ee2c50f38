"""Twenty interruptions of one run of two nodes, from a seeded list of all causes, under Slurm's
default time-outs: the run ends like one that was left alone, and no end is told wrongly.
"""

from __future__ import annotations

import json
import os
import random
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from jobs import ledger
from jobs.ledger import Entry
from jobs.records import attempts
from tests.system import digits_reward
from tests.system import test_slurm_interruptions as ways
from tests.system.slurm_runs import causes, slurm, state, step, wait
from tests.system.test_slurm_sweep import Lab
from trainer.base.rank_info import hosts_of
from trainer.base.run_folder import log_folder, read_json

pytestmark = [pytest.mark.system, pytest.mark.exhaustive, pytest.mark.timeout(5400)]
STEPS = 70
ANSWERS_PER_RANK_AND_STEP = 4
HELD_AFTER = 3
"""Steps after which an attempt makes no more until it is interrupted."""
SEED = 20261201
COUNT = 20
BUDGETS = [
    f"hydra.launcher.{name}={COUNT}"
    for name in ("max_node_failures", "max_bad_nodes", "max_crashes", "max_num_timeout")
]


@dataclass(frozen=True)
class Runs:
    """The interrupted run, the one that was left alone, and the index of the attempt that each
    interruption ended.
    """

    interrupted: Entry
    alone: Entry
    ended: list[int]


@dataclass(frozen=True)
class Way:
    """A way to interrupt a run, and the causes that may be told of it."""

    interrupt: Callable[[Entry, Path], None]
    causes: tuple[str, ...]


def _preempt(entry: Entry, lab: Path) -> None:
    slurm(
        *("sbatch", "-p", "high", "-w", _nodes(entry)[-1], "--exclusive", "-t", "1"),
        *("-o", "/dev/null", "--wrap", "true"),
    )


def _signal(entry: Entry, lab: Path) -> None:
    slurm("scancel", "--signal=USR2", entry.job)


def _terminate(entry: Entry, lab: Path) -> None:
    slurm("scancel", "--signal=TERM", entry.job)


def _requeue(entry: Entry, lab: Path) -> None:
    slurm("scontrol", "requeue", entry.job)


def _kill_rank(entry: Entry, lab: Path) -> None:
    os.kill(_rank_pid(entry, 1), signal.SIGKILL)


def _segfault_rank(entry: Entry, lab: Path) -> None:
    os.kill(_rank_pid(entry, 0), signal.SIGSEGV)


def _abort_rank(entry: Entry, lab: Path) -> None:
    os.kill(_rank_pid(entry, 1), signal.SIGABRT)


def _lose_second_node(entry: Entry, lab: Path) -> None:
    """Slurm goes on calling the job RUNNING: it takes 300 s to notice by itself."""
    node = _nodes(entry)[-1]
    number = len(causes(entry))
    ways.kill_daemon(lab, node)
    ways.kill_job_processes(entry, node)
    wait(lambda: len(causes(entry)) > number, f"the end without {node}", entry)
    ways.declare_down(node)
    ways.start_daemon(lab, node)


def _lose_first_node(entry: Entry, lab: Path) -> None:
    """The node of the batch script dies with all processes of the job there."""
    node = _nodes(entry)[0]
    ways.kill_daemon(lab, node)
    ways.kill_job_processes(entry)
    ways.declare_down(node)
    ways.start_daemon(lab, node)


def _reach_the_time_limit(entry: Entry, lab: Path) -> None:
    number = len(causes(entry))
    slurm("scontrol", "update", f"JobId={entry.job}", "TimeLimit=10")
    wait(lambda: len(causes(entry)) > number, "the time limit", entry)
    slurm("scontrol", "update", f"JobId={entry.job}", "TimeLimit=60")


WAYS = {
    "preempt": Way(_preempt, ("preempted",)),
    "USR2": Way(_signal, ("signalled",)),
    "TERM": Way(_terminate, ("signalled",)),
    "requeue": Way(_requeue, ("requeued",)),
    "time limit": Way(_reach_the_time_limit, ("timeout",)),
    "KILL of a rank": Way(_kill_rank, ("crash", "out_of_memory")),
    "SEGV of a rank": Way(_segfault_rank, ("crash",)),
    "ABRT of a rank": Way(_abort_rank, ("crash",)),
    "second node": Way(_lose_second_node, ("node_failure",)),
    "first node": Way(_lose_first_node, ("node_failure",)),
}


def _list() -> list[str]:
    """Every way twice, in an order drawn from the seed."""
    names = sorted(WAYS) * (COUNT // len(WAYS))
    random.Random(SEED).shuffle(names)
    return names


def _nodes(entry: Entry) -> list[str]:
    number = len(attempts(Path(entry.run))) + 1
    begin = read_json(log_folder(Path(entry.run), number) / "begin.json")
    return hosts_of(str(begin["nodes"]))


def _rank_pid(entry: Entry, rank: int) -> int:
    """The process of a rank of the running attempt."""
    array = entry.job.split("_")[0]
    marks = (f"SLURM_ARRAY_JOB_ID={array} ", f"SLURM_PROCID={rank} ", "-m trainer.worker ")
    found: list[int] = []

    def is_there() -> bool:
        found[:] = [
            pid for pid, text in ways.all_processes() if all(mark in text for mark in marks)
        ]
        return bool(found)

    wait(is_there, f"the process of rank {rank}", entry)
    return min(found)


def _submit(root: Path, lab: Lab, name: str, reward: Path, *nodes: str) -> Entry:
    lab.sweep(
        name,
        "container=none",
        f"trainer.total_training_steps={STEPS}",
        "trainer.logger=[console,wandb]",
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.actor.optim.lr=1e-3",
        "data.val_max_samples=2",
        "data.num_workers=0",
        "trainer.plot_interval=1000",
        "trainer.checkpoint.save_freq=2",
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=1",
        "trainer.device=cpu",
        f'hydra.launcher.exclude="{ways.all_nodes_except(*nodes)}"',
        "hydra.launcher.resubmit=always",
        "hydra.launcher.timeout_min=60",
        "hydra.launcher.signal_delay_s=580",
        *BUDGETS,
    )
    return next(e for e in ledger.read(root / "ledger.jsonl") if e.sweep == name)


def _saved_step(entry: Entry) -> int:
    manifests = (Path(entry.run) / "checkpoints").glob("step_*/manifest.json")
    names = [path.parent.name.removeprefix("step_") for path in manifests]
    return max((int(name) for name in names if name.isdigit()), default=0)


@pytest.fixture(scope="module")
def runs(slurm_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runs]:
    """The interrupted run and the one that was left alone, both at their ends."""
    root = tmp_path_factory.mktemp("random")
    lab = Lab(root)
    del lab.env["PLIMSOLL_WORKER_MODULE"]
    alone = _submit(root, lab, "alone", Path(digits_reward.__file__), "n6", "n7")
    held = HELD_AFTER * ANSWERS_PER_RANK_AND_STEP
    reward = digits_reward.held_copy(root / "reward", held)
    entry = _submit(root, lab, "interrupted", reward, "n1", "n2", "n3", "n4", "n5")
    chance = random.Random(SEED)
    interrupted_attempts: list[int] = []
    for number, name in enumerate(_list()):
        target = step(entry) + chance.randrange(1, HELD_AFTER)
        wait(lambda at=target: step(entry) >= at, f"the steps before {name} ({number})", entry)
        saved = _saved_step(entry)
        # Slurm may end an attempt by itself, on a node that it had thought lost.
        ended = len(causes(entry))
        interrupted_attempts.append(ended)
        WAYS[name].interrupt(entry, slurm_lab)
        wait(lambda at=ended: len(causes(entry)) > at, f"the end by {name} ({number})", entry)
        told = attempts(Path(entry.run))[ended]
        assert told["requeue"], (number, name, told)
        begin = log_folder(Path(entry.run), ended + 2) / "begin.json"
        wait(begin.exists, f"the attempt after {name} ({number})", entry)
        assert read_json(begin)["step"] >= saved, (number, name)
    reward.with_name("hold").unlink()
    for one in (entry, alone):
        wait(lambda one=one: state(one) == "COMPLETED", f"the end of {one.name}", one)
    yield Runs(entry, alone, interrupted_attempts)


def test_twenty_interruptions_change_nothing(runs: Runs) -> None:
    assert ways.metrics_of(runs.interrupted, STEPS) == ways.metrics_of(runs.alone, STEPS)
    weights = ways.weights_of(runs.interrupted, STEPS)
    expected = ways.weights_of(runs.alone, STEPS)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_no_end_is_told_wrongly(runs: Runs) -> None:
    told = attempts(Path(runs.interrupted.run))
    assert told[-1]["cause"] == "done"
    wrong = [
        (name, told[index]["cause"], told[index]["why"])
        for name, index in zip(_list(), runs.ended, strict=True)
        if told[index]["cause"] not in WAYS[name].causes
    ]
    assert wrong == []


def test_it_is_one_wandb_run(runs: Runs) -> None:
    folder = Path(runs.interrupted.run)
    identity = json.loads((folder / "wandb.json").read_text())
    names = [path.name for path in (folder / "wandb").glob("offline-run-*")]
    assert names and {name.rpartition("-")[2] for name in names} == {identity["id"]}
