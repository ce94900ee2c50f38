"""Naming what is not finite, before it spreads."""

from __future__ import annotations

import torch
from torch import Tensor


def not_finite(**tensors: Tensor | None) -> str | None:
    """None when all values are finite; otherwise one line: each tensor's name, how many of its
    values are NaN or infinite and where the first stands. Reads every value once; a device
    synchronisation per tensor.
    """
    found = []
    for name, tensor in tensors.items():
        if tensor is None or not tensor.is_floating_point():
            continue
        bad = ~torch.isfinite(tensor.detach())
        count = int(bad.sum())
        if count:
            first = int(bad.flatten().nonzero()[0])
            value = tensor.detach().flatten()[first].item()
            found.append(
                f"{name}: {count} of {tensor.numel()} values, the first is {value} at {first}"
            )
    return "; ".join(found) or None
