"""Whether what a checkpoint would hold is finite."""

from __future__ import annotations

from typing import Any

import torch

from trainer.checkpoint.snapshot.fragments import fragments


def first_not_finite(ds: Any, *, include_untrained: bool) -> str | None:
    """The first weight or optimizer state of this rank with NaN or infinity, by name; None when all
    are finite.

    One pass over the memory and one wait for the device: a sum is not finite where an element is
    not, and the few sums that overflow are looked at again.
    """
    live = [f for f in fragments(ds, include_untrained=include_untrained) if f.numel]
    floating = [f for f in live if f.tensor.is_floating_point()]
    if not floating:
        return None
    device = floating[0].tensor.device
    with torch.no_grad():
        sums = [f.tensor.sum(dtype=torch.float32).to(device) for f in floating]
        finite = torch.stack(sums).isfinite().tolist()
        for fragment, is_finite in zip(floating, finite, strict=True):
            if not is_finite and not bool(fragment.tensor.isfinite().all()):
                return f"{fragment.name} ({fragment.kind})"
    return None
