"""A run's state besides weights and optimizer, by name: a checkpoint holds what is added here."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class StateRegistry:
    """Named states, saved and restored in the order in which they were added."""

    def __init__(self) -> None:
        self._savers: dict[str, Callable[[], Any]] = {}
        self._loaders: dict[str, Callable[[Any], object]] = {}
        self._optional: set[str] = set()

    def add(
        self,
        name: str,
        save: Callable[[], Any],
        load: Callable[[Any], object],
        *,
        optional: bool = False,
    ) -> None:
        """Add a state under ``name``, which stands in checkpoints on disk and never changes.

        ``save`` returns plain data (see ``trainer.checkpoint.snapshot.state.encode``), ``load``
        takes it back. ``optional``: nothing is amiss in a checkpoint without it.
        """
        if name in self._savers:
            raise ValueError(f"there is a state {name} already")
        self._savers[name] = save
        self._loaders[name] = load
        if optional:
            self._optional.add(name)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all states, in order."""
        return tuple(self._savers)

    def state_dict(self) -> dict[str, Any]:
        """Name -> what a checkpoint keeps of it."""
        return {name: save() for name, save in self._savers.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> list[str]:
        """Load each state. Returns the names that ``state`` lacks: another version wrote it."""
        missing = []
        for name, load in self._loaders.items():
            if name in state:
                load(state[name])
            elif name not in self._optional:
                missing.append(name)
        return missing
