"""What DeepSpeed would write, without writing it: its ``save_checkpoint`` runs with a checkpoint
engine that only keeps the state dicts it is handed. So the files have DeepSpeed's own names and
contents, and its tools go on working.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.checkpoint.constants import (
    UNIVERSAL_CHECKPOINT_INFO,
    UNIVERSAL_CHECKPOINT_VERSION_KEY,
    UNIVERSAL_CHECKPOINT_VERSION_VALUE,
)
from deepspeed.runtime.checkpoint_engine.checkpoint_engine import (
    CheckpointCommitInfo,
    CheckpointEngine,
)
from torch import nn

UNIVERSAL = {UNIVERSAL_CHECKPOINT_VERSION_KEY: UNIVERSAL_CHECKPOINT_VERSION_VALUE}
"""DeepSpeed's universal conversion asks for it; it could hold rules for tensor-parallel slices, and
there are none.
"""
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
        """False: no need to clone views before they are handed over; each tensor is copied by
        itself.
        """
        return False


class Capturer:
    """Captures the state of one engine again and again. What stays the same is looked up once:
    training waits.
    """

    def __init__(self, ds: Any, *, frozen: bool = True) -> None:
        """``frozen``: weights that are not trained, too."""
        self._ds, self._more = ds, {} if frozen else {"exclude_frozen_parameters": True}
        self._instead: dict[str, Any] | None = None

    def capture(self, tag: str) -> dict[str, Any]:
        """Relative path -> state dict of each file of this rank. Collective: all ranks call it at a
        step boundary.
        """
        if self._instead is None:
            self._instead = _spared(self._ds)
        engine, info = Capture(), {UNIVERSAL_CHECKPOINT_INFO: dict(UNIVERSAL)}
        with ExitStack() as stack:
            for name, value in {"checkpoint_engine": engine, **self._instead}.items():
                stack.enter_context(_instead(self._ds, name, value))
            self._ds.save_checkpoint(
                ".", tag=tag, client_state=info, save_latest=False, **self._more
            )
        return engine.states

    def buffers(self) -> list[torch.Tensor]:
        """The module's buffers that are saved."""
        known = (self._instead or {}).get("module_state_dict")
        return list(self._ds.module.buffers()) if known is None else known.buffers()


def _spared(ds: Any) -> dict[str, Any]:
    """Methods of DeepSpeed's engine that take long or ask all ranks, and what does for them
    here.
    """
    spared: dict[str, Any] = {
        "_copy_recovery_script": lambda path: None,
        "_checkpoint_tag_validation": lambda tag: None,  # the ranks agree on the step
    }
    if hasattr(ds, "_get_buffer_names"):
        names = ds._get_buffer_names()
        spared["_get_buffer_names"] = lambda: list(names)
    if hasattr(ds, "module_state_dict") and (state := _ModuleState.of(ds)):
        spared["module_state_dict"] = state
    return {name: value for name, value in spared.items() if hasattr(ds, name)}


class _ModuleState:
    """``module_state_dict`` without a walk through all modules, each with its hooks."""

    def __init__(self, module: nn.Module) -> None:
        self._entries: list[tuple[str, dict[str, Any], str]] = []
        for prefix, child in module.named_modules(remove_duplicate=False):
            start = f"{prefix}." if prefix else ""
            kept = [
                name for name in child._buffers if name not in child._non_persistent_buffers_set
            ]
            for owner, names in (
                (child._parameters, list(child._parameters)),
                (child._buffers, kept),
            ):
                self._entries += [
                    (start + name, owner, name) for name in names if owner[name] is not None
                ]
        self._metadata: Any = None

    @staticmethod
    def of(ds: Any) -> _ModuleState | None:
        """None for a module whose state is more than its parameters and buffers."""
        wanted = ds.module_state_dict()
        state = _ModuleState(ds.module)
        state._metadata = getattr(wanted, "_metadata", None)
        found = state()
        same = list(found) == list(wanted) and all(
            map(_same_memory, wanted.values(), found.values())
        )
        return state if same else None

    def __call__(
        self, exclude_frozen_parameters: bool = False, **unused: Any
    ) -> OrderedDict[str, Any]:
        found = OrderedDict(
            (name, owner[key].detach())
            for name, owner, key in self._entries
            if owner[key].requires_grad
            or not (exclude_frozen_parameters and isinstance(owner[key], nn.Parameter))
        )
        if self._metadata is not None:
            found._metadata = self._metadata  # type: ignore[attr-defined]
        return found

    def buffers(self) -> list[torch.Tensor]:
        """Those that are saved."""
        return [
            owner[key]
            for _, owner, key in self._entries
            if not isinstance(owner[key], nn.Parameter)
        ]


def _same_memory(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.data_ptr() == other.data_ptr()


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
