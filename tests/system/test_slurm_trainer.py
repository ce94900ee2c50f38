"""The real trainer on a real Slurm: a run that was preempted and signalled ends as one that nobody disturbed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from jobs import ledger
from jobs.ledger import Entry
from jobs.records import read_lines
from tests.system.slurm_runs import causes, slurm, state, step, wait
from tests.system.test_slurm_sweep import Lab

pytestmark = pytest.mark.system
STEPS = 12
SAME_EVERY_TIME = (
    "critic/score/mean",
    "actor/pg_loss",
    "actor/grad_norm",
    "actor/entropy",
    "response_length/mean",
    "actor/lr",
)


@pytest.fixture(scope="module")
def lab(slurm_lab: Path, tmp_path_factory: pytest.TempPathFactory) -> Lab:
    lab = Lab(tmp_path_factory.mktemp("trainer"))
    del lab.env["PLIMSOLL_WORKER_MODULE"]
    return lab


def _submit(lab: Lab, name: str, node: str) -> Entry:
    others = ",".join(f"n{n}" for n in range(1, 5) if f"n{n}" != node)
    reward = Path(__file__).parent / "digits_reward.py"
    lab.sweep(
        name, "container=none", f"trainer.total_training_steps={STEPS}", "trainer.logger=[console,wandb]",
        f"custom_reward_function.path={reward}", "actor_rollout_ref.actor.optim.lr=1e-3",
        "data.val_max_samples=2", "data.num_workers=0", "trainer.plot_interval=1000",
        "trainer.checkpoint.save_freq=1000",
        f'hydra.launcher.exclude="{others}"', "hydra.launcher.resubmit=always", "trainer.n_gpus_per_node=1",
    )  # fmt: skip
    return next(e for e in ledger.read(lab.folder / "ledger.jsonl") if e.sweep == name)


def _metrics(entry: Entry) -> dict[int, dict[str, float]]:
    rows = [row for row in read_lines(Path(entry.run) / "metrics.jsonl") if "actor/grad_norm" in row]
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))  # none lost, none twice
    return {row["step"]: {name: row[name] for name in SAME_EVERY_TIME} for row in rows}


def _weights(entry: Entry) -> dict[str, torch.Tensor]:
    folder = Path(entry.run) / f"checkpoints/step_{STEPS}/global_step{STEPS}"
    tensors = torch.load(next(iter(folder.glob("*model_states.pt"))), map_location="cpu", weights_only=False)["module"]
    return dict(tensors)


def test_preempted_and_signalled_equals_undisturbed_bit_for_bit(lab: Lab) -> None:
    calm, broken = _submit(lab, "calm", "n3"), _submit(lab, "broken", "n1")
    wait(lambda: step(broken) >= 3, 240, "step 3", broken)
    slurm("sbatch", "-p", "high", "-w", "n1", "--exclusive", "-t", "1", "-o", "/dev/null", "--wrap", "true")
    wait(lambda: len(causes(broken)) == 1, 60, "the preemption", broken)
    seen = step(broken)
    wait(lambda: step(broken) >= seen + 2, 240, "two more steps", broken)
    slurm("scancel", "--signal=USR2", broken.job)
    wait(lambda: state(broken) == state(calm) == "COMPLETED", 300, "the end", broken)
    assert causes(broken) == ["preempted", "signalled", "done"] and causes(calm) == ["done"]
    assert _metrics(broken) == _metrics(calm)
    assert any(row["actor/grad_norm"] > 0 for row in _metrics(calm).values())
    ours, theirs = _weights(broken), _weights(calm)
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)
    # One W&B run over all attempts, in its sweep's group, sent in the order of the attempts.
    assert json.loads((Path(broken.run) / "wandb.json").read_text())["group"] == "broken"
    sync = lab.command("jobs", "sync", "broken", "--dry-run").stdout.splitlines()
    assert len(sync) == 3 and ["--append" in line for line in sync] == [False, True, True]
    assert len({line.rpartition("-")[2] for line in sync}) == 1
