"""Interrupted runs on a real Slurm end with the same weights as undisturbed ones, bit for bit.

The scenarios run at the same time, each on its own nodes; the tests then check their ends. The real
trainer is interrupted once in every way; the quick stand-in is preempted ten times in a row, and
others are cancelled, lose one of two nodes, can't be launched, or crash. Slurm's time-outs are its
defaults: it takes five minutes to call a node down by itself.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs import ledger
from jobs.ledger import Entry
from jobs.records import attempts
from tests.system import digits_reward
from tests.system.conftest import NODES
from tests.system.slurm_runs import Sweep, causes, dev_point, slurm, state, step, wait
from tests.system.test_slurm_sweep import Lab
from trainer.base.rank_info import hosts_of
from trainer.base.rank_records import read_records
from trainer.base.run_folder import log_folder, read_json, read_json_lines

pytestmark = [pytest.mark.system, pytest.mark.timeout(3600)]
STEPS = 24
STANDIN_STEPS = 60
PREEMPTIONS = 10
ANSWERS_PER_STEP = 8
"""Answers that a training step of the real trainer scores."""
EQUAL_METRICS = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "actor/lr",
)
ALL_NODES = [f"n{number}" for number in range(1, NODES + 1)]
INTERRUPTIONS = ["preempted", "signalled", "requeued", "timeout", "node_failure"]


@dataclass
class Scenarios:
    """The runs of all scenarios, and the Slurm lab that they share."""

    root: Path
    lab: Path
    trainer: Lab
    runs: dict[str, Future[Entry]]

    def ended(self, name: str) -> Entry:
        """The run's entry, once its scenario is over."""
        return self.runs[name].result(timeout=3500)


@pytest.fixture(scope="module")
def scenarios(slurm_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scenarios]:
    root = tmp_path_factory.mktemp("interruptions")
    trainer = Lab(root)
    del trainer.env["PLIMSOLL_WORKER_MODULE"]
    scenarios = Scenarios(root, slurm_lab, trainer, {})
    functions: dict[str, Callable[[Scenarios], Entry]] = {
        "interrupted": _run_interrupted,
        "undisturbed": _run_undisturbed,
        "preempted": _preempt_often,
        "cancelled": _cancel,
        "lost peer": _lose_one_of_two_nodes,
        "not launched": _kill_the_daemon_before_the_launch,
        "crashed": _crash_once,
    }
    with ThreadPoolExecutor(len(functions)) as pool:
        scenarios.runs |= {
            name: pool.submit(scenario, scenarios) for name, scenario in functions.items()
        }
        yield scenarios


def all_nodes_except(*nodes: str) -> str:
    """The value of ``exclude`` that leaves ``nodes``."""
    return ",".join(node for node in ALL_NODES if node not in nodes)


def _trainer(
    scenarios: Scenarios, name: str, reward: Path, *nodes: str, logger: str = "[console]"
) -> Entry:
    """Submit the real trainer through the command line."""
    scenarios.trainer.sweep(
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
        f'hydra.launcher.exclude="{all_nodes_except(*nodes)}"',
        "hydra.launcher.resubmit=always",
        "trainer.n_gpus_per_node=1",
        "hydra.launcher.timeout_min=60",
        "hydra.launcher.signal_delay_s=580",
    )
    return next(e for e in ledger.read(scenarios.root / "ledger.jsonl") if e.sweep == name)


def _standin(
    scenarios: Scenarios,
    name: str,
    nodes: Sequence[str],
    steps: int,
    standin: str = "",
    *,
    setup: Sequence[str] = (),
    **settings: Any,
) -> Entry:
    """Submit the stand-in, which has the name of the sweep, for ``nodes``."""
    point = dev_point(0, name, steps, **settings)
    exclude = all_nodes_except(*nodes)
    return Sweep(scenarios.root / name, [point], standin, setup, exclude=exclude).entry(0)


def _finish(entry: Entry) -> Entry:
    wait(lambda: state(entry) == "COMPLETED", f"the end of {entry.name}", entry)
    return entry


def _run_undisturbed(scenarios: Scenarios) -> Entry:
    return _finish(_trainer(scenarios, "undisturbed", Path(digits_reward.__file__), "n3"))


def _run_interrupted(scenarios: Scenarios) -> Entry:
    """Interrupt one run in every way. Each attempt pauses after three steps until it is signalled,
    so that none ends before its interruption.
    """
    reward = digits_reward.held_copy(scenarios.root / "reward", 3 * ANSWERS_PER_STEP)
    entry = _trainer(scenarios, "interrupted", reward, "n1", "n2", logger="[console,wandb]")
    interruptions = (_preempt, _signal_twice, _requeue, _reach_the_time_limit, _lose_the_node)
    for number, interrupt in enumerate(interruptions):
        _interrupt(entry, scenarios.lab, interrupt, number, after_steps=2)
    reward.with_name("hold").unlink()
    return _finish(entry)


def _interrupt(
    entry: Entry,
    lab: Path,
    interrupt: Callable[[Entry, Path], None],
    number: int,
    *,
    after_steps: int,
) -> None:
    """Interruption ``number`` of a run, after so many more steps; return when the attempt ended."""
    event = f"{interrupt.__name__} (interruption {number}) of {entry.name}"
    target = step(entry) + after_steps
    wait(lambda: step(entry) >= target, f"{after_steps} steps before {event}", entry)
    interrupt(entry, lab)
    wait(lambda: len(causes(entry)) > number, f"the end of {event}", entry)


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
    # A container runtime may pass a signal on a second time.
    slurm("scancel", "--signal=USR2", entry.job, check=False)


def _requeue(entry: Entry, lab: Path) -> None:
    """Requeue as an operator does: the ranks get only TERM, as on a site that sends no USR2."""
    slurm("scontrol", "requeue", entry.job)


def _reach_the_time_limit(entry: Entry, lab: Path) -> None:
    """Lower the time limit to ten minutes. With a warning of 580 s, Slurm then sends its signal at
    its next check, within 30 s.
    """
    slurm("scontrol", "update", f"JobId={entry.job}", "TimeLimit=10")
    wait(lambda: causes(entry)[-1:] == ["timeout"], "the time limit", entry)
    slurm("scontrol", "update", f"JobId={entry.job}", "TimeLimit=60")


def _lose_the_node(entry: Entry, lab: Path) -> None:
    """Kill the node's daemon and every process of the job there."""
    node = _node_of(entry)
    kill_daemon(lab, node)
    kill_job_processes(entry)
    number = len(attempts(Path(entry.run))) + 1
    declare_down(node)
    _wait_for_attempt(entry, number + 1)
    # The tests that follow need a node of that name.
    start_daemon(lab, node)


def _wait_for_attempt(entry: Entry, number: int) -> None:
    """A lost node comes back when the job runs elsewhere: Slurm 22.05 may revoke the credential
    of a job that it requeued, and starts in the second in which a node of it comes back.
    """
    begin = log_folder(Path(entry.run), number) / "begin.json"
    wait(begin.exists, f"attempt {number} of {entry.name}", entry)


def kill_daemon(lab: Path, node: str) -> None:
    _kill(int((lab / f"pid/slurmd-{node}.pid").read_text()))


def start_daemon(lab: Path, node: str) -> None:
    with (lab / f"log/slurmd-{node}.out").open("ab") as log:
        daemon = shutil.which("slurmd", path=f"{os.environ['PATH']}:/usr/sbin:/sbin")
        new_daemon = subprocess.Popen(
            [str(daemon), "-D", "-N", node], stdout=log, stderr=log, stdin=subprocess.DEVNULL
        )
    (lab / f"pid/slurmd-{node}.pid").write_text(str(new_daemon.pid))


def declare_down(node: str) -> None:
    """Do what Slurm does by itself after SlurmdTimeout, and wait until it is done."""
    slurm("scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=killed")
    wait(lambda: "down" in slurm("sinfo", "-h", "-n", node, "-o", "%T"), f"the loss of {node}")


def kill_job_processes(entry: Entry, node: str = "") -> None:
    """Kill every process of a job, or those on one of its nodes, with Slurm's own that watch
    them: all at one instant, as when the machine dies, so that none tells of another's end.
    """
    array = entry.job.split("_")[0]
    job = f"SLURM_ARRAY_JOB_ID={array} "
    place = f"SLURMD_NODENAME={node} " if node else ""
    processes = all_processes()
    victims = [pid for pid, text in processes if job in text and place in text]
    watchers = [pid for pid, text in processes if f"slurmstepd: [{array}." in text]
    if node:
        parents = {_parent_of(pid) for pid in victims}
        watchers = [pid for pid in watchers if pid in parents]
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in [*watchers, *victims]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def _parent_of(pid: int) -> int:
    text = Path(f"/proc/{pid}/stat").read_text()
    return int(text.rpartition(")")[2].split()[1])


def all_processes() -> list[tuple[int, str]]:
    """Process id, and command line with environment, of every other process."""
    processes = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit() and int(folder.name) != os.getpid():
            try:
                command = _text_of(folder / "cmdline")
                environment = _text_of(folder / "environ")
            except OSError:
                continue
            processes.append((int(folder.name), f"{command} {environment} "))
    return processes


def _text_of(file: Path) -> str:
    return file.read_bytes().replace(b"\0", b" ").decode(errors="replace")


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def _preempt_often(scenarios: Scenarios) -> Entry:
    entry = _standin(scenarios, "preempted", ["n4"], STANDIN_STEPS, "STANDIN_HOLD_AFTER=5")
    for number in range(PREEMPTIONS):
        _interrupt(entry, scenarios.lab, _preempt, number, after_steps=3)
    (Path(entry.run) / "go").touch()
    return _finish(entry)


def _cancel(scenarios: Scenarios) -> Entry:
    entry = _standin(scenarios, "cancelled", ["n3"], 100000)
    wait(lambda: step(entry) >= 10, "ten steps", entry)
    slurm("scancel", entry.job)
    states: list[str] = []

    def is_cancelled() -> bool:
        states.append(state(entry))
        return states[-1] == "CANCELLED"

    wait(is_cancelled, "the cancellation", entry)
    assert set(states) <= {"RUNNING", "COMPLETING", "ENDING", "CANCELLED"}, states  # never LOST
    return entry


def _lose_one_of_two_nodes(scenarios: Scenarios) -> Entry:
    """The second node dies with all that runs there. Slurm goes on calling the job RUNNING."""
    entry = _standin(
        scenarios,
        "together",
        ["n5", "n6", "n7"],
        STANDIN_STEPS,
        "STANDIN_HOLD_AFTER=12",
        trainer__nnodes=2,
        trainer__device="cpu",
    )
    wait(lambda: step(entry) >= 12, "twelve steps", entry)
    first, second = hosts_of(_node_of(entry))
    kill_daemon(scenarios.lab, second)
    kill_job_processes(entry, second)
    wait(lambda: causes(entry), f"the end without {second}", entry)
    # What Slurm does by itself after five minutes; until then the job is COMPLETING.
    declare_down(second)
    _wait_for_attempt(entry, 2)
    start_daemon(scenarios.lab, second)
    (Path(entry.run) / "go").touch()
    assert first in ALL_NODES
    return _finish(entry)


def _kill_the_daemon_before_the_launch(scenarios: Scenarios) -> Entry:
    """The node's daemon dies while the batch script is still at the user's setup lines."""
    mark = scenarios.root / "setup"
    entry = _standin(
        scenarios,
        "launch",
        ["n8", "n9"],
        10,
        setup=[f"touch {mark}; until [ -e {mark}.go ]; do sleep 0.1; done; true"],
    )
    wait(mark.exists, "the setup lines", entry)
    node = slurm("squeue", "-h", "-j", entry.job, "-o", "%N").strip()
    kill_daemon(scenarios.lab, node)
    mark.with_name("setup.go").touch()
    wait(lambda: causes(entry), "the end of the launch", entry)
    start_daemon(scenarios.lab, node)
    return _finish(entry)


def _crash_once(scenarios: Scenarios) -> Entry:
    return _finish(_standin(scenarios, "segfault", ["n3"], 10))


def metrics_of(entry: Entry, steps: int) -> dict[int, dict[str, float]]:
    """The metrics that must be equal, by step; each of ``steps`` was logged once."""
    rows = [
        row
        for row in read_json_lines(Path(entry.run) / "metrics.jsonl")
        if "actor/grad_norm" in row
    ]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return {row["step"]: {name: row[name] for name in EQUAL_METRICS} for row in rows}


def weights_of(entry: Entry, steps: int) -> dict[str, torch.Tensor]:
    """The weights of the checkpoint after the last of ``steps``."""
    folder = Path(entry.run) / f"checkpoints/step_{steps}/global_step{steps}"
    tensors = torch.load(
        next(iter(folder.glob("*model_states.pt"))), map_location="cpu", weights_only=False
    )["module"]
    return dict(tensors)


def test_a_run_interrupted_in_every_way_equals_the_undisturbed_run(
    scenarios: Scenarios,
) -> None:
    interrupted = scenarios.ended("interrupted")
    undisturbed = scenarios.ended("undisturbed")
    assert causes(interrupted) == [*INTERRUPTIONS, "done"] and causes(undisturbed) == ["done"]
    assert metrics_of(interrupted, STEPS) == metrics_of(undisturbed, STEPS)
    assert any(row["actor/grad_norm"] > 0 for row in metrics_of(undisturbed, STEPS).values())
    weights = weights_of(interrupted, STEPS)
    expected = weights_of(undisturbed, STEPS)
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in weights)


def test_every_attempt_is_recorded(scenarios: Scenarios) -> None:
    run = Path(scenarios.ended("interrupted").run)
    lines = attempts(run)
    for line in lines:
        assert line["nodes"] in ("n1", "n2") and line["gpu_s"] == line["wall_s"] > 0
        assert line["step_to"] > line["step_from"]
        assert (run / f"logs/attempt_{line['attempt']}/rank_0.log").exists()
    for before, after in pairwise(lines):
        if before["exit_code"] is None:  # killed: it repeats the steps since the last checkpoint
            assert after["step_from"] <= before["step_to"]
        else:
            assert after["step_from"] == before["step_to"]
        assert before["end"] <= after["start"] and before["requeue"]
    lost, last = lines[-2:]
    assert lost["nodes"] != last["nodes"] and lost["exit_code"] is None
    assert lost["end"] < last["start"]  # the wait in the queue is not charged to the lost attempt


def test_all_attempts_are_one_wandb_run(scenarios: Scenarios) -> None:
    run = Path(scenarios.ended("interrupted").run)
    identity = json.loads((run / "wandb.json").read_text())
    assert identity["group"] == "interrupted"
    folders = [folder.name for folder in (run / "wandb").glob("offline-run-*")]
    assert {name.rpartition("-")[2] for name in folders} == {identity["id"]}
    sync = scenarios.trainer.command("jobs", "sync", "interrupted", "--dry-run").stdout.splitlines()
    assert len(sync) == 1 and str(run) in sync[0]


def test_ten_preemptions_in_a_row_repeat_no_step(scenarios: Scenarios) -> None:
    entry = scenarios.ended("preempted")
    assert causes(entry) == ["preempted"] * PREEMPTIONS + ["done"]
    weights = ""
    for number in range(1, STANDIN_STEPS + 1):
        weights = hashlib.sha256(f"{weights}{number}".encode()).hexdigest()
    saved = json.loads((Path(entry.run) / "state_0.json").read_text())
    assert (saved["step"], saved["weights"]) == (STANDIN_STEPS, weights)
    lines = attempts(Path(entry.run))
    starts = [line["step_from"] for line in lines[1:]]
    assert starts == [line["step_to"] for line in lines[:-1]]  # no step twice


def test_a_cancelled_run_saves_and_stays_cancelled(scenarios: Scenarios) -> None:
    entry = scenarios.ended("cancelled")
    assert causes(entry) == ["cancelled"]
    assert json.loads((Path(entry.run) / "state_0.json").read_text())["step"] >= 10
    assert (
        slurm(
            "squeue", "-h", "-j", entry.job.split("_")[0], "-t", "PENDING,RUNNING", check=False
        ).strip()
        == ""
    )


def test_a_node_lost_under_slurms_default_time_outs_is_left(scenarios: Scenarios) -> None:
    entry = scenarios.ended("lost peer")
    lost, last = attempts(Path(entry.run))
    assert (lost["cause"], last["cause"]) == ("node_failure", "done"), lost["why"]
    assert lost["requeue"] and lost["bad_nodes"] == hosts_of(lost["nodes"])[1:]
    # Away from the lost node, and not to those that the user left out.
    assert set(hosts_of(last["nodes"])) == {"n5", "n6", "n7"} - set(lost["bad_nodes"])
    ends = [record.end for record in read_records(log_folder(Path(entry.run), 1)).values()]
    assert ends[0] is not None and ends[0].kind == "lost_peer" and ends[1] is None
    assert (last["step_from"], last["step_to"]) == (12, STANDIN_STEPS)


def test_a_launch_that_failed_is_queued_again_on_another_node(scenarios: Scenarios) -> None:
    entry = scenarios.ended("not launched")
    failed, last = attempts(Path(entry.run))
    assert (failed["cause"], last["cause"]) == ("node_failure", "done"), failed["why"]
    assert failed["bad_nodes"] == [failed["nodes"]] != [last["nodes"]]


def test_a_crash_is_queued_again(scenarios: Scenarios) -> None:
    entry = scenarios.ended("crashed")
    crash, last = attempts(Path(entry.run))
    assert (crash["cause"], last["cause"]) == ("crash", "done")
    assert crash["exit_code"] == 139 and "SIGSEGV" in crash["why"]
