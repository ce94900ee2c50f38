"""What the critic minimises: the clipped error of its values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.algorithms import aggregate, value_loss
from trainer.config.schema import Config
from trainer.data.batch import Batch
from trainer.models import Packed, target_values
from trainer.update.forward import at_targets
from trainer.update.losses import LossAggregation


class ValueObjective:
    """PPO's clipped value loss against the column ``returns``, around the column ``values`` of the
    critic that the advantages were made with.
    """

    sum_names: tuple[str, ...] = ("tokens", "vf_clipfrac", "vf_loss", "vpred")

    def __init__(self, aggregation: LossAggregation, *, clip_range: float) -> None:
        self._aggregation = aggregation
        self._clip_range = clip_range

    @classmethod
    def from_config(cls, config: Config) -> ValueObjective:
        """From ``critic.cliprange_value`` and ``critic.loss_agg_mode``."""
        aggregation = LossAggregation(
            mode=config.critic.loss_agg_mode,
            max_response_length=config.data.max_response_length,
        )
        return cls(aggregation, clip_range=config.critic.cliprange_value)

    def attach_weights(self, batch: Batch) -> None:
        """Attach the column ``weights`` ``[tokens]``."""
        self._aggregation.attach_weights(batch)

    def predict(self, module: nn.Module, packed: Packed, forward: Callable[..., Any]) -> Tensor:
        """Values ``[targets]`` of the states in which the targets were chosen."""
        return target_values(module, packed, forward=forward)

    def __call__(
        self, micro: Batch, packed: Packed, outputs: Tensor
    ) -> tuple[Tensor, Mapping[str, float]]:
        """The loss of a micro-batch (scalar), and the sums named by ``sum_names``; ``outputs``:
        values ``[targets]``.
        """
        device = outputs.device
        out = value_loss(
            outputs,
            at_targets(micro, "values", packed, device),
            at_targets(micro, "returns", packed, device),
            clip_range=self._clip_range,
        )
        loss = aggregate(out.losses, at_targets(micro, "weights", packed, device))
        with torch.no_grad():
            sums = {name: float(value) for name, value in out.sums.items()}
            sums["vf_loss"] = float(loss)
            sums["vpred"] = float(outputs.double().sum())
        return loss, sums

    @staticmethod
    def metrics(sums: Mapping[str, float], steps: int) -> dict[str, float]:
        """Metrics from the sums over the ``steps`` optimizer steps of an iteration."""
        tokens = max(sums["tokens"], 1.0)
        return {
            "critic/vf_loss": sums["vf_loss"] / steps,
            "critic/vf_clipfrac": sums["vf_clipfrac"] / tokens,
            "critic/vpred_mean": sums["vpred"] / tokens,
        }
