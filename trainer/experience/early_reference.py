"""The reference's pass over responses that are finished, while an engine of its own process
generates the others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.batching import CostModel
from trainer.data import Batch
from trainer.experience.batch import to_batch
from trainer.experience.prompts import Ask
from trainer.experience.sampler import Rollouts
from trainer.models.lora import adapters_off
from trainer.rewards import Score
from trainer.rollout import Sample
from trainer.run.build import Context
from trainer.update.forward import run_micro_batch
from trainer.update.micro_batches import Stowage, stow


class EarlyReference:
    """Gathers finished prompts of this rank and runs the reference on them as soon as a micro-batch
    is full.

    Which responses share a micro-batch follows the order of finishing, so log-probs differ by
    rounding from one run to the next, as the samples of such an engine may anyway.
    """

    def __init__(
        self,
        module: nn.Module,
        stowage: Stowage,
        cost: CostModel,
        *,
        budget: int,
        n: int,
        temperature: float,
    ) -> None:
        self._module, self._cost, self._n, self._temperature = module, cost, n, temperature
        self._stowage = replace(stowage, budget=budget, sync="step")
        self._budget = budget
        self._waiting: dict[int, Sequence[Sample]] = {}
        self._tokens = 0
        self._columns: dict[int, list[Tensor]] = {}

    @classmethod
    def of(cls, ctx: Context) -> EarlyReference | None:
        """The one of this step; None where there is no reference, or an engine in this process, so
        that nothing is to be gained, and where the reference's weights are sharded.
        """
        rollout = ctx.config.actor_rollout_ref.rollout
        concurrent = (
            rollout.name == "vllm_server" and rollout.streaming and not rollout.one_step_off
        )
        alone = (
            ctx.ref_stowage.sync == "step"
        )  # its weights are whole here: no rank waits for another
        if (
            ctx.reference is None
            or not (concurrent and alone)
            or not ctx.ref_stowage.dynamic
            or ctx.rolling is None
        ):
            return None
        budget = ctx.ref_stowage.budget
        mine = int(budget if isinstance(budget, int) else budget[ctx.world.rank])
        return cls(
            ctx.reference,
            ctx.ref_stowage,
            ctx.cost,
            budget=mine,
            n=ctx.rolling.sampler.n,
            temperature=ctx.objective.temperature,
        )

    def __call__(self, asks: Sequence[Ask], place: int, samples: Sequence[Sample]) -> None:
        """One more prompt is finished."""
        self._waiting[place] = samples
        self._tokens += sum(
            len(asks[place].example.prompt_ids) + len(s.response_ids) for s in samples
        )
        if self._tokens >= self._budget:
            self._run(asks)

    def attach(self, batch: Batch, rollouts: Rollouts, asks: Sequence[Ask]) -> None:
        """The column ``ref_log_probs`` of this rank's ``batch``, made of ``rollouts``; runs what
        still waits.
        """
        self._run(asks)
        order = [self._columns[place][i % self._n] for i, place in enumerate(rollouts.prompts)]
        batch.columns["ref_log_probs"] = torch.cat([torch.zeros(0), *order])

    @torch.no_grad()
    def _run(self, asks: Sequence[Ask]) -> None:
        places = list(self._waiting)
        if not places:
            return
        rollouts = Rollouts(
            prompts=[place for place in places for _ in range(self._n)],
            samples=[s for place in places for s in self._waiting[place]],
            scores=[Score(value=0.0)] * (len(places) * self._n),
        )
        batch = to_batch(rollouts, asks, self._n)
        column = torch.zeros(batch.num_tokens)
        for indices in stow(batch, self._stowage, 1, self._cost).micro_batches[0]:
            chosen = torch.from_numpy(indices)
            micro = batch.select(chosen)
            with adapters_off(self._module) as module:
                packed, stats = run_micro_batch(
                    module, micro, self._stowage, temperature=self._temperature
                )
            column[batch.token_index(chosen)[packed.targets]] = stats.log_probs.float().cpu()
        parts = torch.split(column, batch.lengths.tolist())
        for k, place in enumerate(places):
            self._columns[place] = list(parts[k * self._n : (k + 1) * self._n])
        self._waiting, self._tokens = {}, 0
