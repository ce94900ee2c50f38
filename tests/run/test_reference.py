"""The reference moves when it is due, by what its decay says, and only then is it part of a
checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.run.reference import follow, reference_state


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
def test_each_second_step(dtype: torch.dtype, decay: float, values: list[float]) -> None:
    ctx, seen, said = context(2, decay, dtype), [], []
    for step in (1, 2, 3, 4):
        said.append(follow(ctx, step)["actor/reference_step"])
        seen.append(ctx.reference.weight.item())
    assert seen == values and said == [0, 2, 2, 4]
    assert ctx.engine.module.weight.item() == 3 and not ctx.reference.weight.requires_grad


def test_a_frozen_one_stays_and_is_in_no_checkpoint() -> None:
    ctx = context(None, 0.5)
    assert (
        follow(ctx, 500) == {} and float(ctx.reference.weight) == 1 and reference_state(ctx) == {}
    )
    ctx.reference = None
    assert follow(ctx, 500) == {} and reference_state(ctx) == {}


def test_what_a_checkpoint_holds_is_the_live_reference() -> None:
    ctx = context(1, 0.0)
    held = reference_state(ctx)
    assert set(held) == {"reference.weight", "reference.bias"}
    follow(ctx, 1)
    assert all(float(t) == 3 for t in held.values())
