"""One optimizer step: plan, K micro-batches on every rank, one step. Survives running out of memory by lowering a budget."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from trainer.batching import CostModel, Plan
from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats
from trainer.parallel.engine import Engine
from trainer.steps.forward import my_micro_batches, run_micro_batch
from trainer.steps.stow import Stowage, stow


class Objective(Protocol):
    """What is minimised, per micro-batch. ``bind`` takes the global counts before the step's batch is split."""

    temperature: float
    wants_entropy: bool
    sums: tuple[str, ...]
    """Names of what ``__call__`` returns to be added up; the same on every rank."""

    def bind(self, batch: Batch) -> None:
        """Attach the column ``weights`` [tokens], so that the step's loss is a plain sum over all micro-batches."""

    def __call__(self, micro: Batch, packed: Packed, stats: TokenStats) -> tuple[Tensor, Mapping[str, float]]:
        """This micro-batch's share of the loss (scalar), and sums to be added over micro-batches and ranks."""


@dataclass
class Update:
    """What an optimizer step did. ``sums`` are over all micro-batches and ranks."""

    plan: Plan
    sums: dict[str, float]
    grad_norm: float
    applied: bool
    times: list[tuple[list[int], float]] = field(default_factory=list)
    """This rank's micro-batches: lengths of the sequences, seconds."""


def update(
    engine: Engine, batch: Batch, objective: Objective, stowage: Stowage, cost: CostModel, *, lr: float, max_norm: float
) -> Update:
    """Take one optimizer step on ``batch``, which every rank holds whole."""
    objective.bind(batch)
    plan = stow(batch, stowage, engine.world.size, cost)
    sums = dict.fromkeys(objective.sums, 0.0)
    for indices in my_micro_batches(plan, engine.world):
        micro = batch.select(indices)
        packed, stats = run_micro_batch(
            engine.module,
            micro,
            stowage,
            temperature=objective.temperature,
            entropy=objective.wants_entropy,
            forward=engine.forward,
        )
        loss, part = objective(micro, packed, stats)
        engine.backward(loss)
        for name, value in part.items():
            sums[name] += value
    result = engine.step(lr=lr, max_norm=max_norm)
    return Update(plan, engine.world.sum(sums), result.grad_norm, result.applied)
