"""A small real training for the checkpoint tests: AdamW, DeepSpeed and gloo."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")

import deepspeed.comm.torch
import torch
import torch.distributed as dist
from torch import nn

from trainer.checkpoint.snapshot.fragments import fragments, full_shapes
from trainer.parallel.deepspeed_setup import EngineSettings
from trainer.parallel.engine import Engine
from trainer.ranks.world import World

# DeepSpeed would compile its shared-memory all-reduce first: a minute for ranks that run for half a
# second.
deepspeed.comm.torch.build_shm_op = lambda: None


class Net(nn.Module):
    """A model with odd sizes, so that partitions cut through parameters.

    It has a tied weight, an untrained one and a buffer.
    """

    def __init__(self, width: int = 13) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, width)
        self.hidden = nn.Linear(width, 2 * width + 1)
        self.norm = nn.LayerNorm(2 * width + 1)
        self.back = nn.Linear(2 * width + 1, width, bias=False)
        self.head = nn.Linear(width, 17, bias=False)
        self.head.weight = self.embed.weight
        self.frozen = nn.Parameter(torch.arange(7, dtype=torch.float32), requires_grad=False)
        self.register_buffer("scale", torch.tensor([0.5, 2.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.back(torch.tanh(self.norm(self.hidden(self.embed(ids)))))
        logits = self.head(hidden) * self.scale.prod() + 0 * self.frozen.sum()
        return nn.functional.cross_entropy(logits[:-1].float(), ids[1:])


def join(rank: int, size: int, store: Path) -> World:
    os.environ.update(
        RANK=str(rank), WORLD_SIZE=str(size), LOCAL_RANK=str(rank), MASTER_ADDR="127.0.0.1"
    )
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(store), size),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=200),
    )
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=200))
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        local_size=size,
        device=torch.device("cpu"),
        cpu_group=group,
    )


def make_engine(
    world: World, *, stage: int = 1, bf16: bool = False, seed: int = 0, width: int = 13
) -> Engine:
    torch.manual_seed(seed)
    settings = EngineSettings(
        zero_stage=stage, bf16=bf16, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
    )
    model = Net(width).to(torch.bfloat16 if bf16 else torch.float32)
    return Engine(model, settings, world)


def train_step(engine: Engine, step: int) -> None:
    """One optimizer step.

    Its data depend on the step alone and are the same on every rank, so worlds of any size compute
    the same gradient.
    """
    ids = torch.randint(0, 17, (24,), generator=torch.Generator().manual_seed(step))
    engine.backward(engine.forward(ids) / engine.world.size)
    engine.step(lr=1e-2, max_norm=1.0)


def full_state(engine: Engine) -> dict[str, torch.Tensor]:
    """Every weight, master copy and moment in full, gathered from all ranks.

    This is what a checkpoint must preserve.
    """
    shapes = full_shapes(engine.ds)
    local: list[Any] = [(f.name, f.kind, f.start, f.tensor.clone()) for f in fragments(engine.ds)]
    gathered: list[Any] = [None] * engine.world.size
    dist.all_gather_object(gathered, local)
    full: dict[str, torch.Tensor] = {}
    for rank_fragments in gathered:
        for name, kind, start, tensor in rank_fragments:
            numel = 1 if kind == "step" else int(torch.Size(shapes[name]).numel())
            out = full.setdefault(
                f"{name}/{kind}", torch.full((numel,), float("nan"), dtype=tensor.dtype)
            )
            out[start : start + tensor.numel()] = tensor
    return full
