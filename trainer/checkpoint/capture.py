"""What DeepSpeed would write, without writing it: its ``save_checkpoint`` runs with a checkpoint engine that only keeps
the state dicts it is handed. So the files have DeepSpeed's own names and contents, and its tools go on working.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import CheckpointCommitInfo, CheckpointEngine

UNIVERSAL = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
"""DeepSpeed's universal conversion asks for it; it could hold rules for tensor-parallel slices, and there are none."""
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


class Capture(CheckpointEngine):  # type: ignore[misc]
    """Keeps references to live tensors: their contents must rest until they are copied."""

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Any] = {}

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """The writer makes folders."""

    def save(self, state_dict: Any, path: str) -> None:
        """Keep ``state_dict`` under its path relative to the save folder."""
        self.states[os.path.normpath(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Never: a checkpoint is restored from its index."""
        raise NotImplementedError(path)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """The commit protocol is ours."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: no need to clone views before they are handed over; each tensor is copied by itself."""
        return False


def capture(ds: Any, tag: str) -> dict[str, Any]:
    """Relative path -> state dict of each file of this rank. Collective: all ranks call it at a step boundary."""
    engine = Capture()
    with _instead(ds, "checkpoint_engine", engine), _instead(ds, "_copy_recovery_script", lambda path: None):
        ds.save_checkpoint(".", tag=tag, client_state={UNIVERSAL_CHECKPOINT_INFO: dict(UNIVERSAL)}, save_latest=False)
    return engine.states


@cache
def scripts() -> dict[str, bytes]:
    """DeepSpeed's tools that consolidate a checkpoint; it lays them beside every one."""
    folder = Path(deepspeed.__file__).parent / "utils"
    return {name: (folder / name).read_bytes() for name in SCRIPTS}


@contextmanager
def _instead(ds: Any, name: str, value: Any) -> Iterator[None]:
    had, before = name in vars(ds), getattr(ds, name)
    setattr(ds, name, value)
    try:
        yield
    finally:
        setattr(ds, name, before) if had else delattr(ds, name)
