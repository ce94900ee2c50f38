"""Reading a checkpoint into a live engine of any number of ranks and any ZeRO stage. Nothing is
unpickled.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.checkpoint.snapshot import state
from trainer.checkpoint.snapshot.fragments import (
    BESIDE,
    MASTER,
    STEP,
    WEIGHT,
    Fragment,
    fragments,
    shapes,
    zero_stage,
)
from trainer.checkpoint.store.manifest import Damaged, Manifest


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run goes on from. Weights and optimizer are already in the engine; random states are
    the caller's to set, last of all, since restoring may draw numbers.
    """

    step: int
    folder: Path
    manifest: Manifest
    rank_state: dict[str, Any] | None
    """This rank's, when the world has its old size; else None."""
    rank_states: list[dict[str, Any]]
    """All ranks' of the old world, by rank."""
    global_state: dict[str, Any]


@dataclass(frozen=True)
class Piece:
    """``numel`` elements of a saved parameter from ``start`` on, at byte ``offset`` of ``path``."""

    start: int
    numel: int
    dtype: str
    path: Path
    offset: int


class Saved:
    """The pieces of a checkpoint, by parameter and kind. Raises Damaged when its index can't be
    read.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder = folder
        self._pieces: dict[tuple[str, str], list[Piece]] = defaultdict(list)
        self._maps: dict[Path, np.ndarray[Any, Any]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.counters: dict[str, int] = {}
        try:
            for rank in range(manifest.world_size):
                body = json.loads((folder / f"state/index_{rank}.json").read_bytes())
                for name, kind, start, numel, dtype, path, offset in body["fragments"]:
                    self._pieces[name, kind].append(
                        Piece(start, numel, dtype, folder / path, offset)
                    )
                if rank == 0:
                    self.shapes = {name: tuple(shape) for name, shape in body["shapes"].items()}
                    self.counters = body["counters"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Damaged(f"{folder.name}/state can't be read ({error})") from error
        for pieces in self._pieces.values():
            pieces.sort(key=lambda p: p.start)

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        """Names of the optimizer's states."""
        return tuple(sorted({kind for _, kind in self._pieces} - {WEIGHT, MASTER, BESIDE}))

    def dtype(self, name: str, kind: str) -> str | None:
        """Type of the saved elements, or None when this kind wasn't saved."""
        pieces = self._pieces.get((name, kind))
        return pieces[0].dtype if pieces else None

    def read(self, name: str, kind: str, start: int, out: Tensor) -> None:
        """Elements [start, start + len(out)) into the flat ``out``. Raises Damaged when some of
        them weren't saved.
        """
        reached, end = start, start + out.numel()
        for piece in self._pieces.get((name, kind), []):
            if piece.start > reached or reached >= end:
                break
            stop = min(end, piece.start + piece.numel)
            if stop > reached:
                part = self._elements(piece, reached - piece.start, stop - reached)
                out[reached - start : stop - start].copy_(part)
                reached = stop
        if reached < end:
            raise Damaged(
                f"{self.folder.name} lacks elements {reached} to {end} of {kind} of {name}"
            )

    def full(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A whole weight with its shape: its master copy if there is one (as ``dtype``, default its
        own).
        """
        kind = MASTER if self.dtype(name, MASTER) else WEIGHT
        own = getattr(torch, self.dtype(name, kind) or "float32")
        out = torch.empty(int(np.prod(self.shapes[name], dtype=np.int64)), dtype=dtype or own)
        self.read(name, kind, 0, out)
        return out.view(self.shapes[name])

    def _elements(self, piece: Piece, first: int, numel: int) -> Tensor:
        data = self._maps.get(piece.path)
        if data is None:
            data = self._maps[piece.path] = np.memmap(piece.path, dtype=np.uint8, mode="c")
        dtype: torch.dtype = getattr(torch, piece.dtype)
        begin = piece.offset + first * dtype.itemsize
        return torch.from_numpy(data[begin : begin + numel * dtype.itemsize]).view(dtype)


def load_engine(ds: Any, saved: Saved, *, frozen: bool = True) -> None:
    """Weights (those that are not trained only if ``frozen``), master copies, optimizer states and
    counters of this rank. Raises UserError when it is another model, Damaged when some of it can't
    be read; no rank waits for another.
    """
    _same_model(shapes(ds), saved)
    with torch.no_grad():
        for fragment in fragments(ds, saved.optimizer_kinds, frozen=frozen):
            saved.read(
                fragment.name,
                _source(saved, fragment),
                0 if fragment.kind == STEP else fragment.start,
                fragment.tensor,
            )
    for name, value in saved.counters.items():
        setattr(ds, name, value)


def settle(ds: Any) -> None:
    """After ``load_engine`` has succeeded on every rank. Collective."""
    if zero_stage(ds) == 3 and (
        persistent := list(getattr(ds.optimizer, "persistent_parameters", []))
    ):
        # Small weights stay gathered under ZeRO-3: gather them anew from the partitions just
        # filled.
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def load_beside(beside: Mapping[str, Tensor], saved: Saved) -> list[str]:
    """Fill the tensors beside the engine; names of those that were not saved. Raises Damaged."""
    with torch.no_grad():
        missing = [name for name in beside if saved.dtype(name, BESIDE) is None]
        for name in beside.keys() - set(missing):
            saved.read(name, BESIDE, 0, beside[name].detach().view(-1))
    return missing


def load_states(folder: Path, manifest: Manifest, rank: int, world_size: int) -> Restored:
    """The states beside the weights. Raises Damaged."""
    try:
        ranks = [
            state.decode((folder / f"state/rank_{r}.safetensors").read_bytes())
            for r in range(manifest.world_size)
        ]
        shared = state.decode((folder / "state/global.safetensors").read_bytes())
    except (OSError, ValueError) as error:
        raise Damaged(f"{folder.name}/state can't be read ({error})") from error
    same = manifest.world_size == world_size
    return Restored(
        step=manifest.step,
        folder=folder,
        manifest=manifest,
        rank_state=ranks[rank] if same else None,
        rank_states=ranks,
        global_state=shared,
    )


def _source(saved: Saved, fragment: Fragment) -> str:
    """Which saved kind fills a live one: the same if it was saved in the same type; masters and
    weights stand in for each other, since a weight is its master copy rounded.
    """
    if fragment.kind not in (WEIGHT, MASTER):
        return fragment.kind
    own = str(fragment.tensor.dtype).removeprefix("torch.")
    if saved.dtype(fragment.name, fragment.kind) == own:
        return fragment.kind
    return MASTER if saved.dtype(fragment.name, MASTER) else WEIGHT


def _same_model(live: dict[str, tuple[int, ...]], saved: Saved) -> None:
    theirs, ours = _adapter_rank(saved.shapes), _adapter_rank(live)
    if theirs != ours:
        raise UserError(
            f"{saved.folder} was trained with actor_rollout_ref.model.lora_rank={theirs}, this run "
            f"has {ours}: set it "
            f"to {theirs}, or start anew with another trainer.experiment_name"
        )
    key = "target_modules" if ours else "path"
    for name in sorted(live.keys() | saved.shapes.keys()):
        if live.get(name) != saved.shapes.get(name):
            raise UserError(
                f"{saved.folder} holds another model: {name} is "
                f"{saved.shapes.get(name, 'not there')} there "
                f"and {live.get(name, 'not there')} here; set actor_rollout_ref.model.{key} to "
                "what the run began "
                "with, or start anew with another trainer.experiment_name"
            )


def _adapter_rank(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """Of LoRA; 0 without."""
    return next((shape[0] for name, shape in shapes.items() if ".lora_A." in name), 0)
