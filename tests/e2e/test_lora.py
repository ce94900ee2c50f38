"""A run with LoRA resumes bit for bit, leaves the base weights alone and exports merged weights."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.e2e.runs import GRPO, finish, metrics, rows, weights
from trainer.export import export
from trainer.models import load_model

ACTOR = "actor_rollout_ref.actor"
MODEL = "actor_rollout_ref.model"
LORA = [
    f"{MODEL}.lora_rank=4",
    f"{MODEL}.enable_gradient_checkpointing=true",
    f"{ACTOR}.optim.lr=5e-3",
    f"{ACTOR}.zero_stage=3",
    f"{ACTOR}.use_kl_loss=true",
    f"{ACTOR}.entropy_coeff=0.1",  # the reward of an untrained model is 0: this gives it a gradient
]


def test_a_lora_run_resumes_bit_for_bit_under_zero_3(tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    rest = tmp_path / "rest"
    arguments = [*GRPO, *LORA, "trainer.total_training_steps=3"]
    finish(whole, *arguments, "trainer.checkpoint.save_freq=2")
    middle = whole / "checkpoints" / "step_2"
    finish(rest, *arguments, "trainer.resume_mode=path", f"trainer.resume_from_path={middle}")
    assert metrics(rest) == {3: metrics(whole)[3]}
    trained = weights(whole)
    assert all(torch.equal(tensor, weights(rest)[name]) for name, tensor in trained.items())
    kl = [row["actor/kl_loss"] for row in rows(whole)]
    assert kl[0] < 1e-6 < kl[-1], "the reference is the model that the run began with"
    base = dict(
        load_model("builtin:tiny", dtype=torch.float32, device="cpu").model.named_parameters()
    )
    assert trained.keys() == base.keys() and "model.layers.0.mlp.up_proj.weight" in trained
    changed = {name for name in trained if not torch.equal(trained[name], base[name])}
    assert changed == {name for name in base if "_proj." in name}
    export(whole, tmp_path / "exported")
    exported = load_model(str(tmp_path / "exported"), dtype=torch.float32, device="cpu").model
    assert all(torch.equal(trained[name], tensor) for name, tensor in exported.named_parameters())
    saved = sum(f.stat().st_size for f in (whole / "checkpoints" / "step_3").rglob("*.pt"))
    assert saved < 4 * sum(p.numel() for p in base.values()), (
        "the frozen weights are in no checkpoint"
    )
