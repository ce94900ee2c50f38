"""Checkpoints of a run: what is saved, when, and how a run goes on from one."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

from trainer.steps.context import Context


class Keeper:
    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self.step = 0
        self.notes: list[str] = []

    def stop_requested(self, here: str | None) -> str | None:
        return "TERM" if self._ctx.world.any(here is not None) else None

    def after_step(self, step: int, metrics: Mapping[str, float], *, last: bool, stop: bool) -> None:
        pass

    def __enter__(self) -> Keeper:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        pass
