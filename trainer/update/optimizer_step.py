"""One optimizer step: plan, K micro-batches on every rank, one step. Running out of memory lowers a
budget.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Protocol

import torch
from torch import Tensor

from trainer.batching import CostModel, Plan, after_out_of_memory
from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats
from trainer.parallel.engine import Engine
from trainer.ranks.world import World
from trainer.update.forward import my_micro_batches, run_micro_batch
from trainer.update.micro_batches import Stowage, stow


class Objective(Protocol):
    """What is minimised, per micro-batch. ``bind`` takes the global counts before the step's batch
    is split.
    """

    temperature: float
    wants_entropy: bool
    sums: tuple[str, ...]
    """Names of what ``__call__`` returns to be added up; the same on every rank."""

    def bind(self, batch: Batch) -> None:
        """Attach the column ``weights`` [tokens], so that the step's loss is a plain sum over all
        micro-batches.
        """

    def __call__(
        self, micro: Batch, packed: Packed, stats: TokenStats
    ) -> tuple[Tensor, Mapping[str, float]]:
        """This micro-batch's share of the loss (scalar), and sums to be added over micro-batches
        and ranks.
        """


@dataclass
class Update:
    """What an optimizer step did. ``sums`` are over all micro-batches and ranks."""

    batch: Batch
    plan: Plan
    sums: dict[str, float]
    grad_norm: float
    applied: bool
    lowered: list[int] | None = None
    """Budgets of all ranks after one ran out of memory, or None when none did."""
    seconds: list[float] = field(default_factory=list)
    """Time of each of this rank's micro-batches, in the order of the plan."""


class _Restart(Exception):
    """A backward pass ran out of memory: the gradients hold a part of a micro-batch and the step
    begins anew.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def update(
    engine: Engine,
    batch: Batch,
    objective: Objective,
    stowage: Stowage,
    cost: CostModel,
    *,
    lr: float,
    max_norm: float,
) -> Update:
    """Take one optimizer step on ``batch``, which every rank holds whole.

    A rank that runs out of memory splits the micro-batch, lowers its budget and goes on; the others
    learn of it at the end of the step, or, where every micro-batch synchronises, before they begin
    the backward pass that would wait for it. Under ZeRO-3, and in a backward pass under ZeRO-2, the
    others already wait: there the error ends the run.
    """
    world = engine.world
    objective.bind(batch)
    planned = stow(batch, stowage, world.size, cost)
    before = [int(b) for b in planned.budgets]
    while True:
        try:
            plan, sums, seconds = _micro_batches(engine, batch, objective, stowage, planned)
            mine, restart = int(plan.budgets[world.rank]), False
        except _Restart as stop:
            mine, restart = int(stop.plan.budgets[world.rank]), True
        budgets = (
            [int(b) for b in world.vector(mine)]
            if world.any(restart or mine != before[world.rank])
            else before
        )
        if not world.any(restart):
            break
        engine.discard()
        planned = stow(batch, replace(stowage, budget=budgets), world.size, cost)
    result = engine.step(lr=lr, max_norm=max_norm)
    lowered = budgets if budgets != before else None
    return Update(batch, plan, world.sum(sums), result.grad_norm, result.applied, lowered, seconds)


def _micro_batches(
    engine: Engine, batch: Batch, objective: Objective, stowage: Stowage, plan: Plan
) -> tuple[Plan, dict[str, float], list[float]]:
    """Forward and backward of this rank's micro-batches; the plan as it was carried out in the
    end.
    """
    sums = dict.fromkeys(objective.sums, 0.0)
    seconds: list[float] = []
    world, k = engine.world, 0
    while k < len(loads := my_micro_batches(plan, world)):
        micro = batch.select(loads[k])
        began = perf_counter()
        out = _forward(engine, micro, objective, stowage)
        failed = _who_failed(world, plan, out is None)
        if failed or out is None:
            # The graph of a rank that got through is dropped too: its part of the micro-batch runs
            # again.
            out = None
            engine.release_memory()
            plan = after_out_of_memory(plan, k, failed)
            continue
        loss, part = out
        try:
            engine.backward(loss)
        except RuntimeError as error:
            if not is_out_of_memory(error) or not can_split(micro, stowage) or plan.sync == "micro":
                raise
            engine.release_memory()
            raise _Restart(after_out_of_memory(plan, k, [world.rank])) from error
        for name, value in part.items():
            sums[name] += value
        engine.wait()
        seconds.append(perf_counter() - began)
        k += 1
    return plan, sums, seconds


def _forward(
    engine: Engine, micro: Batch, objective: Objective, stowage: Stowage
) -> tuple[Tensor, Mapping[str, float]] | None:
    """The micro-batch's loss and sums; None when memory ran out and a smaller micro-batch may
    do.
    """
    try:
        packed, stats = run_micro_batch(
            engine.module,
            micro,
            stowage,
            temperature=objective.temperature,
            entropy=objective.wants_entropy,
            forward=engine.forward,
        )
        return objective(micro, packed, stats)
    except RuntimeError as error:
        # Under ZeRO-3 the other ranks wait in the middle of this forward pass: there is no way
        # back.
        if (
            not is_out_of_memory(error)
            or not can_split(micro, stowage)
            or engine.settings.zero_stage == 3
        ):
            raise
        return None


def _who_failed(world: World, plan: Plan, here: bool) -> list[int]:
    """Ranks whose forward pass of this micro-batch ran out of memory, as far as this rank has to
    know.
    """
    if plan.sync == "step":
        return [world.rank] if here else []
    return [rank for rank, flag in enumerate(world.vector(int(here))) if flag]


def can_split(micro: Batch, stowage: Stowage) -> bool:
    """Whether a smaller budget makes a smaller micro-batch of it."""
    return stowage.dynamic and len(micro) > 0


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether memory, on the device or of the host, is what ``error`` is about."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
