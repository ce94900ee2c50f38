"""With ``ema_interval`` the reference follows the policy and is part of checkpoints; without, it
stays as it was and is in none.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.run.reference import reference_state, update_reference


class Engine:
    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @contextlib.contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        yield self.module


def context(interval: int | None, decay: float, dtype: torch.dtype = torch.float32) -> Any:
    reference = nn.Linear(1, 1).to(dtype).requires_grad_(False)
    policy = nn.Linear(1, 1).to(dtype)
    with torch.no_grad():
        for module, value in ((reference, 1.0), (policy, 3.0)):
            for p in module.parameters():
                p.fill_(value)
    ref = SimpleNamespace(ema_interval=interval, ema_decay=decay)
    config = SimpleNamespace(actor_rollout_ref=SimpleNamespace(ref=ref))
    return SimpleNamespace(config=config, reference=reference, engine=Engine(policy))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("decay", "values"), [(0.5, [1, 2, 2, 2.5]), (0.0, [1, 3, 3, 3]), (1.0, [1, 1, 1, 1])]
)
def test_the_reference_moves_every_ema_interval_steps(
    dtype: torch.dtype, decay: float, values: list[float]
) -> None:
    ctx = context(2, decay, dtype)
    weights: list[float] = []
    reference_steps: list[float] = []
    for step in (1, 2, 3, 4):
        reference_steps.append(update_reference(ctx, step)["actor/reference_step"])
        weights.append(ctx.reference.weight.item())
    assert weights == values
    assert reference_steps == [0, 2, 2, 4]
    assert ctx.engine.module.weight.item() == 3 and not ctx.reference.weight.requires_grad


def test_a_reference_without_interval_stays_and_is_in_no_checkpoint() -> None:
    ctx = context(None, 0.5)
    assert update_reference(ctx, 500) == {}
    assert float(ctx.reference.weight) == 1
    assert reference_state(ctx) == {}
    ctx.reference = None
    assert update_reference(ctx, 500) == {} and reference_state(ctx) == {}


def test_a_checkpoint_holds_the_current_reference() -> None:
    ctx = context(1, 0.0)
    state = reference_state(ctx)
    assert set(state) == {"reference.weight", "reference.bias"}
    update_reference(ctx, 1)
    assert all(float(t) == 3 for t in state.values())
