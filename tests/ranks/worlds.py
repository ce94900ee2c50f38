"""Worlds without process groups."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch

from trainer.ranks.world import World


def single_rank() -> World:
    """A world of one rank, which exchanges nothing."""
    return World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=None)  # type: ignore[arg-type]


class ThreadWorld:
    """Stands for the ``World`` of a rank that runs as a thread of this process."""

    def __init__(self, rank: int, values: list[Any], barrier: threading.Barrier) -> None:
        self.rank = rank
        self._values = values
        self._barrier = barrier

    def gather(self, value: Any) -> list[Any]:
        self._values[self.rank] = value
        self._barrier.wait(60)
        values = list(self._values)
        self._barrier.wait(60)
        return values

    def any(self, flag: int) -> int:
        return max(self.gather(flag))


def run_as_threads(size: int, work: Callable[[Any], None]) -> list[BaseException | None]:
    """Run ``work`` on ``size`` ranks; what each of them raised, by rank."""
    barrier = threading.Barrier(size)
    values: list[Any] = [None] * size
    raised: list[BaseException | None] = [None] * size

    def rank_main(rank: int) -> None:
        try:
            work(ThreadWorld(rank, values, barrier))
        except BaseException as error:
            raised[rank] = error

    threads = [threading.Thread(target=rank_main, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    return raised
