"""Reading the tensors of a checkpoint by its index. Nothing is unpickled."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.checkpoint.snapshot.fragments import EXTRA, MASTER, WEIGHT
from trainer.checkpoint.store.manifest import DamagedError, Manifest


@dataclass(frozen=True)
class SavedFragment:
    """Elements [start, start + numel) of a parameter, at byte ``offset`` of the file ``path``."""

    start: int
    numel: int
    dtype: str
    path: Path
    offset: int


class CheckpointReader:
    """The saved fragments of all ranks, by parameter and kind (see ``snapshot.fragments``)."""

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        """Raises DamagedError when the index can't be decoded, OSError when it can't be read."""
        self.folder = folder
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Name -> full shape of every parameter and buffer."""
        self.counters: dict[str, int] = {}
        self._fragments: dict[tuple[str, str], list[SavedFragment]] = defaultdict(list)
        self._maps: dict[Path, np.ndarray[Any, Any]] = {}
        try:
            for rank in range(manifest.world_size):
                self._read_index(rank)
        except (ValueError, KeyError, TypeError) as error:
            raise DamagedError(f"{folder.name}/state can't be read ({error})") from error
        for fragments in self._fragments.values():
            fragments.sort(key=lambda fragment: fragment.start)

    @property
    def optimizer_kinds(self) -> tuple[str, ...]:
        """Names of the optimizer's states."""
        kinds = {kind for _, kind in self._fragments}
        return tuple(sorted(kinds - {WEIGHT, MASTER, EXTRA}))

    def dtype(self, name: str, kind: str) -> str | None:
        """Type of the saved elements, or None when this kind wasn't saved."""
        fragments = self._fragments.get((name, kind))
        return fragments[0].dtype if fragments else None

    def read_into(self, name: str, kind: str, start: int, out: Tensor) -> None:
        """Read elements [start, start + numel) into the flat ``out``, [numel].

        Raises DamagedError when some of them weren't saved.
        """
        done = start
        end = start + out.numel()
        for fragment in self._fragments.get((name, kind), []):
            if fragment.start > done or done >= end:
                break
            stop = min(end, fragment.start + fragment.numel)
            if stop > done:
                elements = self._elements(fragment, done - fragment.start, stop - done)
                out[done - start : stop - start].copy_(elements)
                done = stop
        if done < end:
            raise DamagedError(
                f"{self.folder.name} lacks elements {done} to {end} of {kind} of {name}"
            )

    def read_weight(self, name: str) -> Tensor:
        """A whole weight in its full shape: its master copy if there is one.

        Raises DamagedError when some of it wasn't saved.
        """
        kind = MASTER if self.dtype(name, MASTER) else WEIGHT
        dtype: torch.dtype = getattr(torch, self.dtype(name, kind) or "float32")
        shape = self.shapes[name]
        out = torch.empty(math.prod(shape), dtype=dtype)
        self.read_into(name, kind, 0, out)
        return out.view(shape)

    def _read_index(self, rank: int) -> None:
        body = json.loads((self.folder / f"state/index_{rank}.json").read_bytes())
        for name, kind, start, numel, dtype, path, offset in body["fragments"]:
            fragment = SavedFragment(start, numel, dtype, self.folder / path, offset)
            self._fragments[name, kind].append(fragment)
        if rank == 0:
            self.shapes = {name: tuple(shape) for name, shape in body["shapes"].items()}
            self.counters = body["counters"]

    def _elements(self, fragment: SavedFragment, first: int, numel: int) -> Tensor:
        """``numel`` elements of ``fragment`` from ``first`` on, mapped from the file."""
        data = self._maps.get(fragment.path)
        if data is None:
            data = np.memmap(fragment.path, dtype=np.uint8, mode="c")
            self._maps[fragment.path] = data
        dtype: torch.dtype = getattr(torch, fragment.dtype)
        begin = fragment.offset + first * dtype.itemsize
        return torch.from_numpy(data[begin : begin + numel * dtype.itemsize]).view(dtype)
