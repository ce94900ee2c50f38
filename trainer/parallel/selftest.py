"""The start-up self-test: uneven micro-batches must give the gradient of their sum, on the engine
that will train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import nn

from trainer.parallel.engine import Engine, EngineSettings
from trainer.ranks.world import World

ROWS, WIDTH = 12, 8


def _loss(model: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return model(x).square().sum() / ROWS


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 1, bias=False)
        )


def run(settings: EngineSettings, world: World) -> float:
    """Compare the engine's gradient norm over 3 uneven micro-batches a rank with that of one plain
    backward.

    Returns the relative difference. Raises RuntimeError when it is above 1e-4 (float32) or 2e-2
    (bfloat16): then this DeepSpeed loses micro-batches, and nothing that it trained could be
    trusted.
    """
    with torch.random.fork_rng():
        torch.manual_seed(2)
        data = torch.randn(world.size, ROWS, WIDTH)
    plain = _model()
    sum(_loss(plain, rows) for rows in data).backward()  # type: ignore[union-attr]
    grads = [p.grad for p in plain.parameters() if p.grad is not None]
    want = float(torch.nn.utils.get_total_norm(grads))
    engine = Engine(_model().to(world.device), replace(settings, weight_decay=0.0), world)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    for micro in torch.split(data[world.rank], [7, 1, 4]):
        engine.backward(_loss(engine.forward, micro.to(world.device, dtype)).float())
    got = engine.step(lr=0.0, max_norm=0.0).grad_norm
    engine.ds.destroy()
    off = abs(got - want) / want
    if not off <= (2e-2 if settings.bf16 else 1e-4):
        raise RuntimeError(
            f"self-test: the gradient of uneven micro-batches under ZeRO {settings.zero_stage} has "
            f"norm {got:.6g}, "
            f"their sum {want:.6g}. This DeepSpeed loses micro-batches; install the locked set "
            "under requirements/"
        )
    return off
