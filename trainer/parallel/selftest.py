"""The start-up self-test: uneven micro-batches must give the gradient of their sum, with the engine
that will train.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor, nn

from trainer.parallel.deepspeed_setup import EngineSettings
from trainer.parallel.engine import Engine
from trainer.ranks.world import World

ROWS = 12
WIDTH = 8
MICRO_BATCHES = (7, 1, 4)
"""Rows of each micro-batch."""


def run(settings: EngineSettings, world: World) -> float:
    """Compare the engine's gradient norm over uneven micro-batches with that of one plain backward.

    Returns the relative difference. Raises RuntimeError when it is above 1e-4 (float32) or 2e-2
    (bfloat16): then this DeepSpeed loses micro-batches, and nothing that it trained could be
    trusted. Collective.
    """
    with torch.random.fork_rng():
        torch.manual_seed(2)
        data = torch.randn(world.size, ROWS, WIDTH)
    expected = _plain_norm(data)
    measured = _engine_norm(data[world.rank], settings, world)
    difference = abs(measured - expected) / expected
    tolerance = 2e-2 if settings.bf16 else 1e-4
    if not difference <= tolerance:  # also for NaN
        raise RuntimeError(
            f"self-test: the gradient of uneven micro-batches under ZeRO {settings.zero_stage} has "
            f"norm {measured:.6g}, their sum {expected:.6g}. This DeepSpeed loses micro-batches; "
            "install the locked set under requirements/"
        )
    return difference


def _plain_norm(data: Tensor) -> float:
    """The gradient norm over all ranks' rows [ranks, rows, width], without DeepSpeed."""
    model = _model()
    torch.stack([_loss(model, rows) for rows in data]).sum().backward()  # type: ignore[no-untyped-call]
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.nn.utils.get_total_norm(gradients))


def _engine_norm(rows: Tensor, settings: EngineSettings, world: World) -> float:
    """The gradient norm that the engine reports for this rank's rows [rows, width]."""
    engine = Engine(_model().to(world.device), replace(settings, weight_decay=0.0), world)
    dtype = torch.bfloat16 if settings.bf16 else torch.float32
    for micro_batch in torch.split(rows, list(MICRO_BATCHES)):
        loss = _loss(engine.forward, micro_batch.to(world.device, dtype))
        engine.backward(loss.float())
    norm = engine.step(lr=0.0, max_norm=0.0).grad_norm
    engine.ds.destroy()
    return norm


def _loss(model: Callable[..., Tensor], rows: Tensor) -> Tensor:
    return model(rows).square().sum() / ROWS


def _model() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(
            nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), nn.Linear(WIDTH, 1, bias=False)
        )
