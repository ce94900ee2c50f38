"""The state dicts that DeepSpeed would write, without writing them.

DeepSpeed's ``save_checkpoint`` runs with a checkpoint engine that only collects what it is given.
So the files have DeepSpeed's own names and contents, and its tools work on them.
"""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
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
"""Required by DeepSpeed's conversion to universal checkpoints; it could hold rules for
tensor-parallel slices, and there are none.
"""
SCRIPTS = ("zero_to_fp32.py", "zero_to_torch.py")


class StateDictCollector(CheckpointEngine):  # type: ignore[misc]
    """A DeepSpeed checkpoint engine that keeps references to the live tensors it is given.

    Their contents must not change until they have been copied.
    """

    def __init__(self) -> None:
        super().__init__()
        self.states: dict[str, Any] = {}
        """Path relative to the save folder -> state dict."""

    def create(self, info: CheckpointCommitInfo) -> None:
        """Nothing to prepare."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing: the writer process makes the folders."""

    def save(self, state_dict: Any, path: str) -> None:
        """Collect ``state_dict``."""
        self.states[os.path.normpath(path)] = state_dict

    def load(self, path: str, map_location: Any = None) -> Any:
        """Not supported: checkpoints are restored from their index."""
        raise NotImplementedError(path)

    def commit(self, info: CheckpointCommitInfo) -> bool:
        """Nothing: the committer commits."""
        return True

    def preserves_storage_sharing(self) -> bool:
        """False: views need not be cloned, since each tensor is copied by itself."""
        return False


class DeepSpeedCapture:
    """Captures the state dicts of one engine again and again.

    What stays the same is looked up once, since training waits for a capture.
    """

    def __init__(self, ds: Any, *, include_untrained: bool = True) -> None:
        """``include_untrained``: also weights that are not trained."""
        self._ds = ds
        self._options = {} if include_untrained else {"exclude_frozen_parameters": True}
        self._fast_methods: dict[str, Any] | None = None

    def capture(self, tag: str) -> dict[str, Any]:
        """Relative path -> state dict of each file of this rank. Collective, at a step boundary."""
        if self._fast_methods is None:
            self._fast_methods = _fast_methods(self._ds)
        collector = StateDictCollector()
        info = {UNIVERSAL_CHECKPOINT_INFO: dict(UNIVERSAL)}
        with ExitStack() as stack:
            stack.enter_context(_replaced(self._ds, "checkpoint_engine", collector))
            for name, method in self._fast_methods.items():
                stack.enter_context(_replaced(self._ds, name, method))
            self._ds.save_checkpoint(
                ".", tag=tag, client_state=info, save_latest=False, **self._options
            )
        return collector.states

    def buffers(self) -> list[torch.Tensor]:
        """The buffers of the module that are saved."""
        module_state = (self._fast_methods or {}).get("module_state_dict")
        if module_state is None:
            return list(self._ds.module.buffers())
        buffers: list[torch.Tensor] = module_state.buffers()
        return buffers


@cache
def deepspeed_scripts() -> dict[str, bytes]:
    """DeepSpeed's scripts that consolidate a checkpoint; it copies them into every checkpoint."""
    folder = Path(deepspeed.__file__).parent / "utils"
    return {name: (folder / name).read_bytes() for name in SCRIPTS}


def _fast_methods(ds: Any) -> dict[str, Callable[..., Any]]:
    """Replacements for methods of DeepSpeed's engine that are slow or collective."""
    methods: dict[str, Callable[..., Any]] = {
        "_copy_recovery_script": lambda path: None,
        "_checkpoint_tag_validation": lambda tag: None,  # the ranks agree on the step
    }
    if hasattr(ds, "_get_buffer_names"):
        names = ds._get_buffer_names()
        methods["_get_buffer_names"] = lambda: list(names)
    if hasattr(ds, "module_state_dict"):
        module_state = _FastModuleState.of(ds)
        if module_state is not None:
            methods["module_state_dict"] = module_state
    return {name: method for name, method in methods.items() if hasattr(ds, name)}


@dataclass(frozen=True)
class _Entry:
    """An entry of a module's state dict and where its tensor is found."""

    name: str
    owner: dict[str, Any]
    """The parameters or the buffers of a submodule."""
    key: str

    @property
    def tensor(self) -> torch.Tensor:
        """The live tensor."""
        tensor: torch.Tensor = self.owner[self.key]
        return tensor


class _FastModuleState:
    """``module_state_dict`` without a walk through all modules and their hooks."""

    def __init__(self, module: nn.Module, metadata: Any) -> None:
        self._metadata = metadata
        self._entries: list[_Entry] = []
        for prefix, child in module.named_modules(remove_duplicate=False):
            start = f"{prefix}." if prefix else ""
            for name, parameter in child._parameters.items():
                if parameter is not None:
                    self._entries.append(_Entry(start + name, child._parameters, name))
            for name, buffer in child._buffers.items():
                if buffer is not None and name not in child._non_persistent_buffers_set:
                    self._entries.append(_Entry(start + name, child._buffers, name))

    @staticmethod
    def of(ds: Any) -> _FastModuleState | None:
        """None for a module whose state is more than its parameters and buffers."""
        expected = ds.module_state_dict()
        state = _FastModuleState(ds.module, getattr(expected, "_metadata", None))
        actual = state()
        if list(actual) != list(expected):
            return None
        same = map(_share_memory, expected.values(), actual.values())
        return state if all(same) else None

    def __call__(
        self, exclude_frozen_parameters: bool = False, **unused: Any
    ) -> OrderedDict[str, Any]:
        state: OrderedDict[str, Any] = OrderedDict()
        for entry in self._entries:
            tensor = entry.tensor
            is_frozen = isinstance(tensor, nn.Parameter) and not tensor.requires_grad
            if not (exclude_frozen_parameters and is_frozen):
                state[entry.name] = tensor.detach()
        if self._metadata is not None:
            state._metadata = self._metadata  # type: ignore[attr-defined]
        return state

    def buffers(self) -> list[torch.Tensor]:
        """The buffers among the entries."""
        tensors = [entry.tensor for entry in self._entries]
        return [tensor for tensor in tensors if not isinstance(tensor, nn.Parameter)]


def _share_memory(one: Any, other: torch.Tensor) -> bool:
    return isinstance(one, torch.Tensor) and one.data_ptr() == other.data_ptr()


@contextmanager
def _replaced(ds: Any, name: str, value: Any) -> Iterator[None]:
    """Within: the attribute ``name`` of ``ds`` is ``value``."""
    was_own_attribute = name in vars(ds)
    before = getattr(ds, name)
    setattr(ds, name, value)
    try:
        yield
    finally:
        if was_own_attribute:
            setattr(ds, name, before)
        else:
            delattr(ds, name)
