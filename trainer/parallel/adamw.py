"""AdamW that clips its gradient and refuses to step on a non-finite one."""

from __future__ import annotations

import math
from typing import Any

import torch


class GuardedAdamW(torch.optim.AdamW):
    """AdamW for ZeRO stage 0 in float32, where DeepSpeed reports no gradient norm and steps on a
    non-finite gradient.
    """

    max_norm: float = 0.0
    """Norm to which the next step clips; 0 for none."""
    grad_norm: float = 0.0
    """Global L2 norm of the last step's gradient before clipping."""
    overflow: bool = False
    """Whether the last step's gradient was not finite. DeepSpeed reads this name."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip to ``max_norm`` and step; leave the weights alone when the norm is not finite."""
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self.grad_norm = float(norm)
        self.overflow = not math.isfinite(self.grad_norm)
        if self.overflow:
            return
        if self.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        super().step(closure)
