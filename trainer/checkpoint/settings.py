"""What a run decides about its checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """Keys of ``trainer.checkpoint`` and of resuming, as the checkpoint room needs them."""

    keep_last: int = 2
    """Newest checkpoints kept; at least 1."""
    keep_every: int | None = None
    """Steps that are multiples of this are kept for good."""
    keep_best: int = 0
    """Checkpoints with the best metric kept beside the newest."""
    best_metric: str | None = None
    """Name of that metric. Checkpoints whose manifest tells of another one are not compared."""
    best: Literal["max", "min"] = "max"
    """Whether a larger metric is better."""
    write_share: float = 0.2
    """Share of the disk's speed at which a save is written while training goes on; 1: as fast as it
    goes.
    """
    async_save: bool = True
    """False: every save waits for its commit."""
    resume_mode: Literal["auto", "disable", "path"] = "auto"
    resume_from_path: str | None = None
    """A folder ``step_N``, for ``resume_mode=path``."""
    going_on: bool = True
    """False: the run only looks at what it restores; newer checkpoints of its own stay where they
    are.
    """
    generations: int = 2
    """Host buffers: one being written while another is filled. Host memory is at most this times a
    rank's share.
    """
    timeout_s: float = 1800.0
    """Longest wait for this rank's disk, or for another rank, in one save."""
    mirror: str | None = None
    """A second home, any fsspec URL: every committed checkpoint is uploaded there, its manifest
    last.
    """
    frozen: bool = True
    """Save weights that are not trained, too. False: they come from where the model came from, each
    time.
    """
    disk: str = "trainer.checkpoint.store.disk:Disk"
    """``module:class`` through which all files are written and renamed; tests inject faults
    here.
    """
