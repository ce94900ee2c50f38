"""Checkpoints that cannot be lost: snapshot, writer process, commit, restore, retention.

The names below load torch on first use; ``policy``, ``manifest``, ``commit`` and ``writer`` need
none.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.checkpoint.checkpointer import Checkpointer
    from trainer.checkpoint.restore import Restored
    from trainer.checkpoint.settings import CheckpointSettings

__all__ = ["CheckpointSettings", "Checkpointer", "Restored"]


def __getattr__(name: str) -> Any:
    if name == "Checkpointer":
        from trainer.checkpoint.checkpointer import Checkpointer

        return Checkpointer
    if name == "Restored":
        from trainer.checkpoint.restore import Restored

        return Restored
    if name == "CheckpointSettings":
        from trainer.checkpoint.settings import CheckpointSettings

        return CheckpointSettings
    raise AttributeError(name)
