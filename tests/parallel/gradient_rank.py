"""A rank of the stowage test: one optimizer step on fixed sequences; rank 0 writes the gradient that the engine used.

With betas (0, 0), a huge eps and a learning rate of SCALE x eps, AdamW moves each weight by SCALE x its gradient: the
move is the gradient, whatever ZeRO stage keeps it where.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from trainer import environment

environment.prepare()

import torch  # noqa: E402

from trainer.batching import CostModel  # noqa: E402
from trainer.data.batch import Batch  # noqa: E402
from trainer.models import load_model  # noqa: E402
from trainer.parallel.engine import Engine, EngineSettings  # noqa: E402
from trainer.parallel.world import join, leave  # noqa: E402
from trainer.steps.stow import Stowage  # noqa: E402
from trainer.steps.update import update  # noqa: E402

EPS, SCALE = 1e8, 100.0


class NegativeLogLikelihood:
    """Token mean of -log p over the whole step."""

    temperature, wants_entropy, sums = 1.0, False, ("loss",)

    def bind(self, batch: Batch) -> None:
        self.count = int(batch.columns["loss_mask"].sum())

    def __call__(self, micro, packed, stats):
        loss = -stats.log_probs.sum() / self.count
        return loss, {"loss": float(loss.detach())}


def make_batch(vocabulary: int) -> Batch:
    """24 sequences of 10 to 500 tokens in groups of four with a common prompt."""
    draw = torch.Generator().manual_seed(5)
    ids, masks, prompts = [], [], []
    for _ in range(6):
        prompt = torch.randint(5, vocabulary, (int(torch.randint(5, 60, (1,), generator=draw)),), generator=draw)
        for _ in range(4):
            n = int(torch.randint(5, 440, (1,), generator=draw))
            ids.append(torch.cat([prompt, torch.randint(5, vocabulary, (n,), generator=draw)]))
            masks.append(torch.arange(len(prompt) + n) >= len(prompt))
            prompts.append(len(prompt))
    rows = {
        "prompt_lengths": torch.tensor(prompts),
        "groups": torch.arange(24) // 4,
        "ids": torch.arange(24),
    }
    return Batch.from_sequences({"input_ids": ids, "loss_mask": masks}, rows)


def main(case: dict, out: Path) -> None:
    info = environment.rank_from_environment()
    world = join(info, device="cpu", run_dir=out.parent, timeout_s=120)
    for number, variant in enumerate(case["variants"]):
        loaded = load_model("builtin:tiny", dtype=torch.float32, device="cpu")
        before = {k: v.clone() for k, v in loaded.model.named_parameters()}
        settings = EngineSettings(zero_stage=variant["zero"], bf16=False, betas=(0.0, 0.0), eps=EPS, weight_decay=0.0)
        engine = Engine(loaded.model, settings, world)
        stowage = Stowage(
            dynamic=variant.get("micro") is None,
            budget=variant.get("budget", 10**6),
            micro_size=variant.get("micro"),
            buckets=variant.get("buckets"),
            share_prompts=variant.get("share", False),
            sync="micro" if engine.needs_equal_counts else "step",
        )
        batch = make_batch(loaded.shape.vocab)
        cost = CostModel.from_shape(loaded.shape)
        done = update(engine, batch, NegativeLogLikelihood(), stowage, cost, lr=SCALE * EPS, max_norm=0.0)
        with engine.whole_weights() as module:
            after = {k: v.detach().clone() for k, v in module.named_parameters()}
        if world.is_main:
            gradient = torch.cat([(before[k] - after[k].float()).flatten() / SCALE for k in before])
            torch.save(
                {
                    "gradient": gradient,
                    "norm": done.grad_norm,
                    "loss": done.sums["loss"],
                    "counts": done.plan.num_micro_batches,
                    "tokens": done.plan.tokens,
                },
                f"{out}.{number}.pt",
            )
        engine.ds.destroy()
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
