"""A rank of the config tests: one optimizer step on fixed sequences a variant; rank 0 writes what
the engine used.

With betas (0, 0), a huge eps and a learning rate of SCALE x eps, AdamW moves each weight by SCALE x
its gradient: the move is the gradient, whatever ZeRO stage keeps it where.

Keys of a variant: ``zero``, ``budget``, ``micro`` (the padded baseline), ``buckets``, ``share``,
``reverse``, ``steps``, ``loss`` (a policy loss, by ``loss_mode``, instead of the likelihood),
``lora`` (rank of trained adapters: the gradient is the move of the merged weights) and
``fail``: [rank, micro-batch, "forward" | "backward"], where memory runs out once.
"""

from __future__ import annotations

import copy
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from trainer.base import environment, rank_info

environment.prepare()

import torch  # noqa: E402
from torch import nn  # noqa: E402

from trainer.algorithms import sequence_index  # noqa: E402
from trainer.batching import CostModel  # noqa: E402
from trainer.config import load  # noqa: E402
from trainer.data.batch import Batch  # noqa: E402
from trainer.models import load_model, load_value_model  # noqa: E402
from trainer.models.lora import Lora, adapters_off, add_adapters  # noqa: E402
from trainer.parallel.deepspeed_setup import EngineSettings  # noqa: E402
from trainer.parallel.engine import Engine  # noqa: E402
from trainer.parallel.weights import whole_weights  # noqa: E402
from trainer.ranks.world import World, join, leave  # noqa: E402
from trainer.update.forward import log_prob_column  # noqa: E402
from trainer.update.losses import (  # noqa: E402
    LossAggregation,
    Objective,
    OfLogProbs,
    PolicyObjective,
)
from trainer.update.micro_batches import MicroBatchConfig, plan_micro_batches  # noqa: E402
from trainer.update.optimizer_step import OptimizerStep, take_step  # noqa: E402
from trainer.update.value_objective import ValueObjective  # noqa: E402

EPS = 1e8
SCALE = 100.0
GROUPS = 8
GROUP_SIZE = 3
TIMEOUT_S = 400.0
WIDE = {"clip_cov_ratio": 0.2, "clip_cov_lb": 0.0, "clip_cov_ub": 9.0, "kl_cov_ratio": 0.2}
"""Shares by which the losses of the covariance treat many tokens apart."""
LAYERS = 2  # enough for a gradient to pass from layer to layer


class NegativeLogLikelihood(OfLogProbs):
    """Token mean of -log p over the whole step."""

    sum_names = ("loss",)

    def attach_weights(self, batch: Batch) -> None:
        self.count = int(batch.columns["loss_mask"].sum())

    def __call__(
        self, micro: Batch, packed: Any, stats: Any
    ) -> tuple[torch.Tensor, Mapping[str, float]]:
        loss = -stats.log_probs.sum() / self.count
        return loss, {"loss": float(loss.detach())}


class ValueLoss(ValueObjective):
    """The critic's loss, under the name by which the others are compared."""

    sum_names = (*ValueObjective.sum_names, "loss")

    def __init__(self) -> None:
        aggregation = LossAggregation(mode="seq-mean-token-mean", max_response_length=180)
        super().__init__(aggregation, clip_range=0.3)

    def __call__(
        self, micro: Batch, packed: Any, outputs: torch.Tensor
    ) -> tuple[torch.Tensor, Mapping[str, float]]:
        loss, sums = super().__call__(micro, packed, outputs)
        return loss, {**sums, "loss": sums["vf_loss"]}


def objective_of(variant: dict[str, Any]) -> Objective[Any]:
    """The loss of the variant; the policy losses with wide shares, so that each has an effect."""
    if "loss" not in variant:
        return NegativeLogLikelihood()
    if variant["loss"] == "value":
        return ValueLoss()
    policy_loss = {"loss_mode": variant["loss"], **WIDE}
    actor = {"loss_agg_mode": "seq-mean-token-mean", "policy_loss": policy_loss}
    rollout = {"n": 2}
    model = {"path": "builtin:tiny"}
    config = load(
        {
            "data": {"task": "arithmetic"},
            "actor_rollout_ref": {"model": model, "rollout": rollout, "actor": actor},
        }
    )
    return PolicyObjective(
        config.actor_rollout_ref.actor,
        LossAggregation.from_config(config),
        temperature=1.0,
        rollout_log_probs=False,
    )


def add_policy_columns(batch: Batch) -> None:
    """What a policy loss reads: old log-probs near those of the model, advantages, draws."""
    draw = torch.Generator().manual_seed(6)
    n = batch.num_tokens
    batch.columns["old_log_probs"] = -6.0 + torch.randn(n, generator=draw)
    batch.columns["advantages"] = torch.randn(len(batch), generator=draw)[
        sequence_index(batch.cu_seqlens)
    ]
    batch.columns["draws"] = torch.rand(n, generator=draw)
    batch.columns["values"] = torch.randn(n, generator=draw)
    batch.columns["returns"] = torch.randn(n, generator=draw)


def make_batch(vocabulary: int) -> Batch:
    """24 sequences of 25 to 180 tokens in groups with a common prompt; about 2,300 tokens."""
    draw = torch.Generator().manual_seed(5)
    ids, masks, prompts = [], [], []
    for _ in range(GROUPS):
        prompt = torch.randint(
            5, vocabulary, (int(torch.randint(20, 60, (1,), generator=draw)),), generator=draw
        )
        for _ in range(GROUP_SIZE):
            n = int(torch.randint(5, 120, (1,), generator=draw))
            ids.append(torch.cat([prompt, torch.randint(5, vocabulary, (n,), generator=draw)]))
            masks.append(torch.arange(len(prompt) + n) >= len(prompt))
            prompts.append(len(prompt))
    count = torch.arange(GROUPS * GROUP_SIZE)
    rows = {"prompt_lengths": torch.tensor(prompts), "groups": count // GROUP_SIZE, "ids": count}
    return Batch.from_sequences({"input_ids": ids, "loss_mask": masks}, rows)


@contextmanager
def failing(
    engine: Engine, model: nn.Module, world: World, fail: tuple[int, int, str] | None
) -> Iterator[None]:
    """Memory runs out once on a rank: in its k-th forward pass, or half-way through that one's
    backward pass.
    """
    if fail is None or fail[0] != world.rank:
        yield
        return
    _, k, where = fail
    calls = 0
    layers = model.model.layers  # type: ignore[union-attr]

    def out_of_memory(*_: Any) -> None:
        raise torch.OutOfMemoryError("injected")

    def after_layer(module: nn.Module, args: Any, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == k + 1:
            if where == "forward":
                out_of_memory()
            (output if isinstance(output, torch.Tensor) else output[0]).register_hook(out_of_memory)

    hook = layers[len(layers) // 2].register_forward_hook(after_layer)  # type: ignore[index,arg-type,union-attr]
    try:
        yield
    finally:
        hook.remove()


def model_of(variant: dict[str, Any], loaded: Any) -> nn.Module:
    """A copy of the model, with adapters that have an effect where the variant trains some."""
    model: nn.Module = copy.deepcopy(loaded.model)
    rank = variant.get("lora")
    if rank is None:
        return model
    add_adapters(model, Lora(rank=rank, alpha=rank))
    torch.manual_seed(11)
    for name, parameter in model.named_parameters():
        if ".lora_B." in name:
            nn.init.normal_(parameter, std=0.2)
    return model


def config_of(variant: dict[str, Any], *, sync: Literal["step", "micro"]) -> MicroBatchConfig:
    """The settings of the update."""
    return MicroBatchConfig(
        dynamic=variant.get("micro") is None,
        budget=variant.get("budget", 10**6),
        micro_size=variant.get("micro"),
        buckets=variant.get("buckets"),
        bucket_by="total",
        share_prompts=variant.get("share", False),
        sync=sync,
    )


def batch_of(variant: dict[str, Any], vocabulary: int) -> Batch:
    """The fixed sequences, backwards where the variant says so."""
    batch = make_batch(vocabulary)
    if "loss" in variant:
        add_policy_columns(batch)
    if variant.get("reverse"):
        return batch.select(torch.arange(len(batch)).flip(0))
    return batch


def reference_difference(
    engine: Engine, loaded: Any, batch: Batch, config: MicroBatchConfig, cost: CostModel
) -> float:
    """Largest difference of log-probs: adapters switched off, and the model as it was loaded."""
    plan = plan_micro_batches(batch, config, engine.world.size, cost)
    with adapters_off(engine.module) as base:
        columns = [
            log_prob_column(model, batch, plan, engine.world, config, temperature=1.0)
            for model in (base, loaded.model)
        ]
    return float((columns[0] - columns[1]).abs().max())


def lowered_by_rank(world: World, done: OptimizerStep) -> list[list[int]] | None:
    """The lowered budgets of each rank; None without any. Collective."""
    if not done.lowered_budgets:
        return None
    by_time = [world.vector(budget) for budget in done.lowered_budgets]
    return [[int(budget) for budget in of_rank] for of_rank in zip(*by_time, strict=True)]


def run_variant(
    number: int, variant: dict[str, Any], loaded: Any, world: World, folder: Path
) -> None:
    model = model_of(variant, loaded)
    before = {k: v.clone() for k, v in whole_weights(model, sharded=False)}
    settings = EngineSettings(
        zero_stage=variant["zero"], bf16=False, betas=(0.0, 0.0), eps=EPS, weight_decay=0.0
    )
    engine = Engine(model, settings, world)
    config = config_of(variant, sync="micro" if engine.needs_equal_counts else "step")
    batch = batch_of(variant, loaded.shape.vocab)
    cost = CostModel.from_shape(loaded.shape)
    with failing(engine, model, world, variant.get("fail")):
        done = take_step(
            engine, batch, objective_of(variant), config, cost, lr=SCALE * EPS, max_norm=0.0
        )
    result = {
        "reference_difference": (
            reference_difference(engine, loaded, batch, config, cost) if "lora" in variant else 0.0
        ),
        "norm": done.grad_norm,
        "loss": done.sums["loss"],
        "counts": [int(n) for n in done.plan.num_micro_batches],
        "tokens": [[int(t) for t in rank] for rank in done.plan.tokens],
        "lowered": lowered_by_rank(world, done),
    }
    # In buckets smaller than the embedding, as a generation engine takes them.
    weights = whole_weights(engine.module, sharded=variant["zero"] == 3, bucket_bytes=100_000)
    after = {k: v.clone() for k, v in weights}
    if world.is_main:
        gradient = torch.cat([(before[k] - after[k].float()).flatten() / SCALE for k in before])
        torch.save(result | {"gradient": gradient.detach()}, folder / f"{number}.pt")
    engine.ds.destroy()


def main(case: dict[str, Any], folder: Path) -> None:
    info = rank_info.rank_from_environment()
    world = join(info, device="cpu", run_dir=folder, meet_s=TIMEOUT_S, timeout_s=TIMEOUT_S)
    loaded = load_model("builtin:tiny", dtype=torch.float32, device="cpu")
    of_values = load_value_model("builtin:tiny", dtype=torch.float32, device="cpu", seed=1)
    for model in (loaded.model, of_values.model):
        model.model.layers = model.model.layers[:LAYERS]
    for number, variant in enumerate(case["variants"]):
        of_variant = of_values if variant.get("loss") == "value" else loaded
        run_variant(number, variant, of_variant, world, folder)
    leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), Path(sys.argv[2]))
