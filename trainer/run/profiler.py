"""A look inside chosen steps: the phases of all ranks, and PyTorch's profile of some."""

from __future__ import annotations

import contextlib
import gzip
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.spans import RankSpans, Span, since, trace_json
from trainer.config.schema.trainer import Profiler
from trainer.ranks.waits import keep_no_waits, keep_waits
from trainer.run.context import RunContext
from trainer.tracking.optional_output import optional_output

ROWS = 15
"""Rows of the table of operations."""
MEMORY_EVENTS = 100_000
"""Allocations that a snapshot of the GPU's memory goes back."""


class StepProfiler:
    """Profiles the steps of ``trainer.profiler.steps``; other steps cost nothing."""

    def __init__(self, ctx: RunContext, tell: Callable[[str], None]) -> None:
        """``tell`` writes a line to the rank's log. Raises :class:`UserError`, on all ranks alike,
        for a tool that the device doesn't have.
        """
        self._ctx = ctx
        self._tell = tell
        self._settings: Profiler = ctx.config.trainer.profiler
        on_gpu = ctx.world.device.type == "cuda"
        if self._settings.steps and self._settings.tool == "torch_memory" and not on_gpu:
            raise UserError(
                "trainer.profiler.tool=torch_memory records the allocator of a GPU, and this run "
                "is on the CPU; set trainer.profiler.tool=torch with contents=[cpu,memory]"
            )

    @contextlib.contextmanager
    def __call__(self, step: int) -> Iterator[None]:
        """The body is training step ``step``. Collective."""
        if step not in (self._settings.steps or ()):
            yield
            return
        folder = self._folder(step)
        self._ctx.world.barrier()  # the clocks' common beginning
        start = time.perf_counter()
        phases = self._ctx.timers.keep_spans()
        waits = keep_waits()
        try:
            with self._tool(folder):
                yield
        finally:
            self._ctx.timers.keep_no_spans()
            keep_no_waits()
        lanes = {"phases": since(start, phases), "exchanges": since(start, waits)}
        self._write_phases(folder, lanes)

    @property
    def _is_chosen(self) -> bool:
        return self._settings.all_ranks or self._ctx.world.rank in self._settings.ranks

    def _folder(self, step: int) -> Path:
        parent = self._settings.save_path
        base = self._ctx.run_dir / "profile" if parent is None else Path(parent)
        return base / f"step_{step}"

    @contextlib.contextmanager
    def _tool(self, folder: Path) -> Iterator[None]:
        if not self._is_chosen:
            yield
            return
        with optional_output(str(folder), self._tell):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if self._settings.tool == "torch_memory":
            with self._memory_history(folder):
                yield
            return
        with self._torch_profile() as recorded:
            yield
        with optional_output(str(folder), self._tell):
            self._write_profile(recorded, folder)

    def _torch_profile(self) -> profile:
        contents = self._settings.contents
        activities = [ProfilerActivity.CPU] if "cpu" in contents else []
        if "cuda" in contents and self._ctx.world.device.type == "cuda":
            activities.append(ProfilerActivity.CUDA)
        return profile(
            activities=activities or [ProfilerActivity.CPU],
            record_shapes="shapes" in contents,
            profile_memory="memory" in contents,
            with_stack="stack" in contents,
        )

    def _write_profile(self, recorded: profile, folder: Path) -> None:
        rank = self._ctx.world.rank
        trace = folder / f"rank_{rank}.pt.trace.json"
        recorded.export_chrome_trace(str(trace))
        with trace.open("rb") as plain, gzip.open(f"{trace}.gz", "wb") as packed:
            shutil.copyfileobj(plain, packed)
        trace.unlink()
        averages = recorded.key_averages()
        on_gpu = self._ctx.world.device.type == "cuda"
        order = "self_device_time_total" if on_gpu else "self_cpu_time_total"
        table = folder / f"rank_{rank}.txt"
        atomic.write_text(table, averages.table(sort_by=order, row_limit=ROWS), durable=False)
        self._tell(f"profile of this step: {trace}.gz (open it at https://ui.perfetto.dev)")
        for event in sorted(averages, key=lambda event: -float(getattr(event, order)))[:ROWS]:
            seconds = float(getattr(event, order)) / 1e6
            self._tell(f"  {seconds:8.3f} s  {event.count:7d} x  {event.key[:50]}")

    @contextlib.contextmanager
    def _memory_history(self, folder: Path) -> Iterator[None]:
        torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        try:
            yield
            with optional_output(str(folder), self._tell):
                snapshot = folder / f"rank_{self._ctx.world.rank}.memory.pickle"
                torch.cuda.memory._dump_snapshot(str(snapshot))  # type: ignore[no-untyped-call]
                self._tell(f"GPU memory of this step: {snapshot} (pytorch.org/memory_viz)")
        finally:
            torch.cuda.memory._record_memory_history(enabled=None)

    def _write_phases(self, folder: Path, lanes: dict[str, list[Span]]) -> None:
        world = self._ctx.world
        spans = RankSpans(world.rank, os.uname().nodename, lanes)
        ranks = world.gather(spans)
        if not world.is_main:
            return
        path = folder / "phases.json"
        with optional_output(str(path), self._tell):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            atomic.write_text(path, trace_json(ranks), durable=False)
            self._tell(f"phases of all ranks: {path} (open it at https://ui.perfetto.dev)")
