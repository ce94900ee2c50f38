"""From live engines to the plan of one rank's files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from trainer.checkpoint.snapshot import capture, state
from trainer.checkpoint.snapshot.fragments import MASTER, WEIGHT, fragments, zero_stage
from trainer.checkpoint.snapshot.index import IndexWriter
from trainer.checkpoint.snapshot.plan import SnapshotPlan
from trainer.checkpoint.snapshot.torch_file import lay_out

COUNTERS = ("global_steps", "global_samples", "skipped_steps", "micro_steps")
"""Attributes of DeepSpeed's engine that are saved."""
EXTRA_FILE = "state/beside.pt"
"""File of the tensors that are not the engine's. Names in checkpoints on disk never change."""


@dataclass(frozen=True)
class CapturedEngine:
    """The state of one engine in one save."""

    states: dict[str, Any]
    """Path -> DeepSpeed's state dict, with live tensors."""
    counters: dict[str, int]
    """Name -> value of each of ``COUNTERS``."""
    buffers: dict[int, Tensor]
    """Address of a live buffer of the module -> a copy of it: a forward pass may change it."""


@dataclass(frozen=True)
class CapturedState:
    """The state of one save, with copies of what training may change before the optimizer step."""

    engines: list[CapturedEngine]
    files: dict[str, bytes]
    """Path -> contents of the files that are ready."""


class EnginePlanner:
    """Plans the files of one rank of one DeepSpeed engine, and their index."""

    def __init__(
        self,
        ds: Any,
        rank: int,
        extra_tensors: Mapping[str, Tensor],
        *,
        include_untrained: bool,
        folder: str = "",
    ) -> None:
        """``folder``: where they lie in the checkpoint."""
        self._ds = ds
        self._rank = rank
        self._folder = folder
        self._extra_tensors = extra_tensors
        self._capture = capture.DeepSpeedCapture(ds, include_untrained=include_untrained)
        self._index = IndexWriter(ds, rank, extra_tensors, include_untrained=include_untrained)

    def capture(self, tag: str) -> CapturedEngine:
        """Capture the state, in the training thread. Collective."""
        states = self._capture.capture(tag)
        if self._extra_tensors:
            states[EXTRA_FILE] = self._extra_tensors
        counters = {name: getattr(self._ds, name) for name in COUNTERS}
        buffers = {b.data_ptr(): b.detach().clone() for b in self._capture.buffers()}
        return CapturedEngine(states, counters, buffers)

    def add_to(self, plan: SnapshotPlan, captured: CapturedEngine) -> None:
        """Lay out the files in ``plan``, in any thread, while the weights don't change."""
        torch_files = {path: lay_out(states) for path, states in captured.states.items()}
        index = self._index.encode(torch_files, captured.counters)
        plan.add_bytes(path_in(self._folder, f"state/index_{self._rank}.json"), index)
        for path, file in torch_files.items():
            plan.add_torch_file(path_in(self._folder, path), file, captured.buffers)


class SnapshotPlanner:
    """Plans the files of one rank: those of its DeepSpeed engines, and the state of the run."""

    def __init__(
        self,
        engines: Mapping[str, Any],
        rank: int,
        extra_tensors: Mapping[str, Tensor] | None = None,
        *,
        include_untrained: bool = True,
    ) -> None:
        """``engines``: folder in the checkpoint -> DeepSpeed engine. ``extra_tensors``: tensors
        that are not an engine's; rank 0 saves them, in the folder of the first.

        ``include_untrained``: also save weights that are not trained.
        """
        self._rank = rank
        self._engines: list[EnginePlanner] = []
        extra = dict(extra_tensors or {}) if rank == 0 else {}
        for folder, ds in engines.items():
            self._engines.append(
                EnginePlanner(ds, rank, extra, include_untrained=include_untrained, folder=folder)
            )
            extra = {}

    def capture(
        self, step: int, rank_state: dict[str, Any], global_state: dict[str, Any]
    ) -> CapturedState:
        """Capture the state after ``step``, in the training thread. Collective."""
        tag = deepspeed_tag(step)
        files = {f"state/rank_{self._rank}.safetensors": state.encode(rank_state)}
        if self._rank == 0:
            files["state/global.safetensors"] = state.encode(global_state)
            files["latest"] = tag.encode()
            files |= capture.deepspeed_scripts()
        return CapturedState([engine.capture(tag) for engine in self._engines], files)

    def plan(self, captured: CapturedState) -> SnapshotPlan:
        """Lay out all files of this rank, in any thread, while the weights don't change.

        Doesn't read the contents of tensors yet.
        """
        plan = SnapshotPlan()
        for path, data in captured.files.items():
            plan.add_bytes(path, data)
        for engine, its_state in zip(self._engines, captured.engines, strict=True):
            engine.add_to(plan, its_state)
        return plan


def path_in(folder: str, path: str) -> str:
    """``path`` inside ``folder`` of a checkpoint; "" is the checkpoint itself."""
    return f"{folder}/{path}" if folder else path


def deepspeed_tag(step: int) -> str:
    """Name of DeepSpeed's folder inside ``step_N``."""
    return f"global_step{step}"


def snapshot_bytes(
    engines: Iterable[Any],
    rank: int,
    extra_tensors: Mapping[str, Tensor],
    *,
    include_untrained: bool,
) -> int:
    """Size of this rank's files of ``engines`` once their optimizers have their states, bytes."""
    nbytes = sum(_engine_bytes(ds, rank, include_untrained) for ds in engines)
    if rank == 0:
        nbytes += sum(t.numel() * t.element_size() for t in extra_tensors.values())
    return nbytes


def _engine_bytes(ds: Any, rank: int, include_untrained: bool) -> int:
    found = fragments(ds, include_untrained=include_untrained)
    masters = sum(f.numel for f in found if f.kind == MASTER)
    weights = sum(f.nbytes for f in found if f.kind == WEIGHT)
    if zero_stage(ds) == 0 and not masters:
        # The optimizer steps the float32 weights, with two moments for each.
        return weights * 3 if rank == 0 else 0
    nbytes = masters * 12  # float32 master copy and two moments
    if rank == 0 and zero_stage(ds) < 3:
        nbytes += weights
    return nbytes
