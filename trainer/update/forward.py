"""One micro-batch through a model, ragged or (the baseline) padded, and columns that all ranks
compute together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from trainer.batching import Plan
from trainer.data.batch import Batch
from trainer.models import Packed, TokenStats, pack, pad, token_stats
from trainer.parallel.exchange import merge_column
from trainer.ranks.world import World
from trainer.update.micro_batches import Stowage


def run_micro_batch(
    module: nn.Module,
    micro: Batch,
    stowage: Stowage,
    *,
    temperature: float,
    entropy: bool = False,
    forward: Callable[..., Any] | None = None,
) -> tuple[Packed, TokenStats]:
    """What went through ``module`` and the statistics of its targets. An empty ``micro`` is a
    filler: no targets.
    """
    packed = pack(micro, share_prompts=stowage.share_prompts) if stowage.dynamic else pad(micro)
    return packed, token_stats(
        module, packed, temperature=temperature, entropy=entropy, forward=forward
    )


def my_micro_batches(plan: Plan, world: World) -> list[Tensor]:
    """int64 [sequences] per micro-batch of this rank: indices into the batch; an empty one is a
    filler.

    A rank without cargo runs one filler: its optimizer step needs gradients, if only zeros.
    """
    loaded = [torch.from_numpy(indices) for indices in plan.micro_batches[world.rank]]
    return loaded or [torch.zeros(0, dtype=torch.int64)]


@torch.no_grad()
def log_prob_column(
    module: nn.Module,
    batch: Batch,
    plan: Plan,
    world: World,
    stowage: Stowage,
    *,
    temperature: float,
) -> Tensor:
    """float32 [tokens]: log-probs of all trained tokens of ``batch`` under ``module``, each
    computed on one rank.
    """
    pieces = []
    for indices in my_micro_batches(plan, world):
        packed, stats = run_micro_batch(
            module, batch.select(indices), stowage, temperature=temperature
        )
        pieces.append((batch.token_index(indices)[packed.targets], stats.log_probs))
    return merge_column(pieces, batch.num_tokens, world)
