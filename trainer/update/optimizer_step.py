"""One optimizer step: a plan, K micro-batches on every rank, one step.

A rank that runs out of memory splits the micro-batch, lowers its budget and goes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from trainer.batching import CostModel, Plan, after_out_of_memory
from trainer.data.batch import Batch
from trainer.parallel.engine import Engine
from trainer.ranks.world import World
from trainer.update.forward import pack_micro_batch, rank_micro_batches
from trainer.update.losses import Objective
from trainer.update.micro_batches import MicroBatchConfig, plan_micro_batches


@dataclass
class OptimizerStep:
    """The result of one optimizer step."""

    batch: Batch
    plan: Plan
    sums: dict[str, float]
    """The objective's sums over all micro-batches and ranks."""
    grad_norm: float
    """Global L2 norm before clipping; NaN when the step was skipped."""
    applied: bool
    """False when the gradient was not finite: the weights are as before."""
    lowered_budgets: list[int] | None = None
    """Budgets of all ranks after one ran out of memory, or None when none did."""
    seconds: list[float] = field(default_factory=list)
    """Time of each of this rank's micro-batches, in the order of the plan."""


class _OutOfMemoryInBackward(Exception):
    """The gradients hold a part of a micro-batch, so the optimizer step has to begin anew."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan


def take_step(
    engine: Engine,
    batch: Batch,
    objective: Objective[Any],
    config: MicroBatchConfig,
    cost: CostModel,
    *,
    lr: float,
    max_norm: float,
) -> OptimizerStep:
    """Take one optimizer step on ``batch``, which every rank holds whole. Collective.

    The other ranks learn of a rank that ran out of memory at the end of the step, or, when every
    micro-batch synchronises, before the backward pass that would wait for it. Under ZeRO-3, and in
    a backward pass under ZeRO-2, the others already wait: there the error ends the run.
    """
    world = engine.world
    objective.attach_weights(batch)
    plan = plan_micro_batches(batch, config, world.size, cost)
    planned_budgets = [int(budget) for budget in plan.budgets]
    while True:
        try:
            executed, sums, seconds = _run_micro_batches(engine, batch, objective, config, plan)
            restart = False
        except _OutOfMemoryInBackward as error:
            executed = error.plan
            restart = True
        budgets = _agreed_budgets(world, executed, planned_budgets, restart=restart)
        if not world.any(restart):
            break
        engine.discard_gradients()
        plan = plan_micro_batches(batch, replace(config, budget=budgets), world.size, cost)
    result = engine.step(lr=lr, max_norm=max_norm)
    return OptimizerStep(
        batch=batch,
        plan=executed,
        sums=world.sum(sums),
        grad_norm=result.grad_norm,
        applied=result.applied,
        lowered_budgets=budgets if budgets != planned_budgets else None,
        seconds=seconds,
    )


def _agreed_budgets(
    world: World, executed: Plan, planned_budgets: list[int], *, restart: bool
) -> list[int]:
    """Budgets of all ranks; exchanged only when one of them changed or a rank restarts."""
    budget = int(executed.budgets[world.rank])
    if not world.any(restart or budget != planned_budgets[world.rank]):
        return planned_budgets
    return [int(b) for b in world.vector(budget)]


def _run_micro_batches(
    engine: Engine, batch: Batch, objective: Objective[Any], config: MicroBatchConfig, plan: Plan
) -> tuple[Plan, dict[str, float], list[float]]:
    """Forward and backward of this rank's micro-batches.

    Returns the plan as it was executed in the end, the objective's sums, and seconds per
    micro-batch.
    """
    sums = dict.fromkeys(objective.sum_names, 0.0)
    seconds: list[float] = []
    world = engine.world
    k = 0
    while True:
        micro_batches = rank_micro_batches(plan, world)  # anew: the plan changes below
        if k == len(micro_batches):
            return plan, sums, seconds
        micro = batch.select(micro_batches[k])
        started = perf_counter()
        output = _forward(engine, micro, objective, config)
        failed_ranks = _ranks_out_of_memory(world, plan, output is None)
        if failed_ranks or output is None:
            # A rank that got through drops its graph too: its part of the micro-batch runs again.
            output = None
            engine.release_memory()
            plan = after_out_of_memory(plan, k, failed_ranks)
            continue
        loss, micro_sums = output
        try:
            engine.backward(loss)
        except RuntimeError as error:
            if plan.sync == "micro" or not _can_retry(error, micro, config):
                raise
            engine.release_memory()
            raise _OutOfMemoryInBackward(after_out_of_memory(plan, k, [world.rank])) from error
        for name, value in micro_sums.items():
            sums[name] += value
        engine.synchronize()
        seconds.append(perf_counter() - started)
        k += 1


def _forward(
    engine: Engine, micro: Batch, objective: Objective[Any], config: MicroBatchConfig
) -> tuple[Tensor, Mapping[str, float]] | None:
    """The micro-batch's loss and sums; None when memory ran out and a smaller one may fit."""
    try:
        packed = pack_micro_batch(micro, config)
        outputs = objective.predict(engine.module, packed, engine.forward)
        return objective(micro, packed, outputs)
    except RuntimeError as error:
        # Under ZeRO-3 the other ranks wait in the middle of this forward pass: no way back.
        if not _can_retry(error, micro, config) or engine.settings.zero_stage == 3:
            raise
        return None


def _ranks_out_of_memory(world: World, plan: Plan, here: bool) -> list[int]:
    """Ranks whose forward pass ran out of memory, as far as this rank has to know."""
    if plan.sync == "step":
        return [world.rank] if here else []
    return [rank for rank, flag in enumerate(world.vector(int(here))) if flag]


def _can_retry(error: RuntimeError, micro: Batch, config: MicroBatchConfig) -> bool:
    """Whether memory ran out, and a smaller budget makes a smaller micro-batch of ``micro``."""
    return is_out_of_memory(error) and config.dynamic and len(micro) > 0


def is_out_of_memory(error: RuntimeError) -> bool:
    """Whether the device or the host ran out of memory."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)
