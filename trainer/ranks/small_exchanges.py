"""What all ranks decide together at the checkpoint's door: on the CPU, in the training thread."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.errors import UserError


class Ranks:
    """This rank among ``size``; ``group``: a process group that moves CPU tensors. Every method is
    collective.
    """

    def __init__(self, rank: int, size: int, group: dist.ProcessGroup | None = None) -> None:
        self.rank, self.size, self._group = rank, size, group

    def told(self, value: Any) -> Any:
        """Rank 0's ``value``, on every rank."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def everyones(self, value: Any) -> list[Any]:
        """Every rank's ``value``, by rank."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._group)
        return values

    def all(self, flag: bool) -> bool:
        """Whether ``flag`` holds on every rank."""
        if self.size == 1:
            return flag
        tensor = torch.tensor(int(flag))
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return bool(tensor)

    def agree(self, action: Callable[[], object], *, only_main: bool = False) -> None:
        """Run ``action`` everywhere (or on rank 0); when it is a UserError anywhere, it is one
        everywhere.
        """
        error: UserError | None = None
        try:
            if self.rank == 0 or not only_main:
                action()
        except UserError as caught:
            error = caught
        everyones = self.everyones(None if error is None else str(error))
        if told := [text for text in everyones if text is not None]:
            raise error or UserError(told[0])  # whichever rank is heard, it says what is wrong
