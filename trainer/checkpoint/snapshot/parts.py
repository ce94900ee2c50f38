"""A run's state beside the weights, as named parts: what a checkpoint holds is what was registered
here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Parts:
    """Parts are saved and restored in the order in which they were added."""

    def __init__(self) -> None:
        self._parts: dict[str, tuple[Callable[[], Any], Callable[[Any], object]]] = {}

    def add(self, name: str, save: Callable[[], Any], load: Callable[[Any], object]) -> None:
        """``save`` gives plain data (see ``trainer.checkpoint.snapshot.state.encode``), ``load``
        takes them back.
        """
        if name in self._parts:
            raise ValueError(f"there is a part {name} already")
        self._parts[name] = save, load

    @property
    def names(self) -> tuple[str, ...]:
        """Of all parts, in order."""
        return tuple(self._parts)

    def state_dict(self) -> dict[str, Any]:
        """By name, what a checkpoint keeps."""
        return {name: save() for name, (save, _) in self._parts.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Give each part its own back. Returns the parts that ``state`` lacks: another version
        wrote it.
        """
        for name, (_, load) in self._parts.items():
            if name in state:
                load(state[name])
        return [name for name in self._parts if name not in state]
