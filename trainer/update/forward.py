"""One micro-batch through a model, and the log-probs of a whole batch from all ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.base import signals
from trainer.batching import Plan
from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats, pack, pad, token_stats
from trainer.parallel.exchange import merge_column
from trainer.ranks.agreement import stop_together
from trainer.ranks.world import World
from trainer.update.micro_batches import MicroBatchConfig


def run_micro_batch(
    module: nn.Module,
    micro: Batch,
    config: MicroBatchConfig,
    *,
    temperature: float,
    entropy: bool = False,
    forward: Callable[..., Any] | None = None,
) -> tuple[Packed, TokenStats]:
    """The packed (or padded) input and the statistics of its targets: log-probs ``[targets]`` and,
    with ``entropy``, entropy ``[targets]``.

    ``forward`` replaces ``module``'s own call.
    """
    packed = pack_micro_batch(micro, config)
    stats = token_stats(module, packed, temperature=temperature, entropy=entropy, forward=forward)
    return packed, stats


def pack_micro_batch(micro: Batch, config: MicroBatchConfig) -> Packed:
    """The input of a model for ``micro``: packed, or padded when not ``dynamic``.

    An empty ``micro`` is a filler without targets.
    """
    if config.dynamic:
        return pack(micro, share_prompts=config.share_prompts)
    return pad(micro)


def at_targets(micro: Batch, column: str, packed: Packed, device: torch.device) -> Tensor:
    """Values ``[targets]`` of a column ``[tokens]``, on ``device``."""
    return micro.columns[column][packed.targets].to(device, non_blocking=True)


def rank_micro_batches(plan: Plan, world: World) -> list[Tensor]:
    """int64 ``[sequences]`` per micro-batch of this rank: indices into the batch.

    A rank without sequences gets one empty micro-batch: its optimizer step needs gradients, even if
    they are zero.
    """
    micro_batches = [torch.from_numpy(indices) for indices in plan.micro_batches[world.rank]]
    return micro_batches or [torch.zeros(0, dtype=torch.int64)]


@torch.no_grad()
def local_log_probs(
    module: nn.Module,
    batch: Batch,
    micro_batches: Iterable[Tensor],
    config: MicroBatchConfig,
    *,
    temperature: float,
) -> Tensor:
    """float32 ``[tokens]`` on the CPU: log-probs of the trained tokens of ``batch``, all computed
    by this rank in ``micro_batches`` (indices ``[sequences]``).
    """
    column = torch.zeros(batch.num_tokens)
    for indices in micro_batches:
        micro = batch.select(indices)
        packed, stats = run_micro_batch(module, micro, config, temperature=temperature)
        column[batch.token_index(indices)[packed.targets]] = stats.log_probs.float().cpu()
    return column


def log_prob_column(
    module: nn.Module,
    batch: Batch,
    plan: Plan,
    world: World,
    config: MicroBatchConfig,
    *,
    temperature: float,
) -> Tensor:
    """float32 ``[tokens]``: log-probs of the trained tokens of ``batch`` under ``module``.

    Collective and raising as ``target_column``.
    """

    def log_probs(packed: Packed) -> Tensor:
        return token_stats(module, packed, temperature=temperature).log_probs

    return target_column(log_probs, batch, plan, world, config)


@torch.no_grad()
def target_column(
    compute: Callable[[Packed], Tensor],
    batch: Batch,
    plan: Plan,
    world: World,
    config: MicroBatchConfig,
) -> Tensor:
    """float32 ``[tokens]``: what ``compute`` gives for the targets ``[targets]`` of a micro-batch,
    at the trained tokens of ``batch``.

    Each sequence is computed on one rank; collective. Raises StopRequested on all ranks, at most
    one micro-batch after one of them was asked to stop.
    """
    pieces = []
    for indices in rank_micro_batches(plan, world):
        if plan.sync == "micro":  # ranks may wait for each other within a forward pass
            stop_together(world)
        elif signals.requested() is not None:
            break
        packed = pack_micro_batch(batch.select(indices), config)
        pieces.append((batch.token_index(indices)[packed.targets], compute(packed)))
    stop_together(world)
    return merge_column(pieces, batch.num_tokens, world)
