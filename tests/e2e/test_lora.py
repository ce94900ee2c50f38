"""A run with adapters goes on from a checkpoint bit for bit; its base stays; what it exports is
whole.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.e2e.runs import GRPO, finish, metrics, rows, weights
from trainer.export import export
from trainer.models import load_model

A, M = "actor_rollout_ref.actor", "actor_rollout_ref.model"
MORE = [
    f"{M}.lora_rank=4",
    f"{M}.enable_gradient_checkpointing=true",
    f"{A}.optim.lr=5e-3",
    f"{A}.zero_stage=3",
    f"{A}.use_kl_loss=true",
    f"{A}.entropy_coeff=0.1",  # an untrained model earns nothing; this gives it a gradient
]


def test_a_run_goes_on_from_the_middle_under_zero_3(tmp_path: Path) -> None:
    whole, rest, given = (
        tmp_path / "whole",
        tmp_path / "rest",
        [*GRPO, *MORE, "trainer.total_training_steps=3"],
    )
    finish(whole, *given, "trainer.checkpoint.save_freq=2")
    middle = whole / "checkpoints" / "step_2"
    finish(rest, *given, "trainer.resume_mode=path", f"trainer.resume_from_path={middle}")
    seen = metrics(whole)
    assert metrics(rest) == {3: seen[3]}
    assert all(torch.equal(tensor, weights(rest)[name]) for name, tensor in weights(whole).items())
    kl = [row["actor/kl_loss"] for row in rows(whole)]
    assert kl[0] < 1e-6 < kl[-1], "the reference is the model that the run began with"
    base = dict(
        load_model("builtin:tiny", dtype=torch.float32, device="cpu").model.named_parameters()
    )
    found = weights(whole)
    assert found.keys() == base.keys() and "model.layers.0.mlp.up_proj.weight" in found
    changed = {name for name in found if not torch.equal(found[name], base[name])}
    assert changed == {name for name in base if "_proj." in name}
    export(whole, tmp_path / "exported")
    again = load_model(str(tmp_path / "exported"), dtype=torch.float32, device="cpu").model
    assert all(torch.equal(found[name], tensor) for name, tensor in again.named_parameters())
    saved = sum(f.stat().st_size for f in (whole / "checkpoints" / "step_3").rglob("*.pt"))
    assert saved < 4 * sum(p.numel() for p in base.values()), (
        "the frozen weights are in no checkpoint"
    )
