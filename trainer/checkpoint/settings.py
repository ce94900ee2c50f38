"""Settings of a run's checkpoints."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trainer.config.schema.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """The keys of ``trainer.checkpoint`` and of resuming, and limits that have no key."""

    keep_last: int = 2
    """Newest checkpoints kept; at least 1."""
    keep_every: int | None = None
    """Checkpoints of steps that are multiples of this are never removed."""
    keep_best: int = 0
    """How many checkpoints with the best metric are kept besides the newest."""
    best_metric: str | None = None
    """Name of that metric. Checkpoints with another metric in their manifest are not compared."""
    best_mode: Literal["max", "min"] = "max"
    """Whether a larger or a smaller metric is better."""
    write_share: float = 0.2
    """Share of the disk's speed at which saves are written beside training; 1: full speed."""
    async_save: bool = True
    """False: every save waits for its commit."""
    resume_mode: Literal["auto", "disable", "path"] = "auto"
    resume_from_path: str | None = None
    """A folder ``step_N``, for ``resume_mode=path``."""
    val_only: bool = False
    """True: the run doesn't train on from what it restores, so its newer checkpoints stay."""
    num_host_buffers: int = 2
    """One is written while another is filled. Each takes at most the size of a rank's files."""
    timeout_s: float = 1800.0
    """Longest wait for this rank's disk, or for another rank, in one save, seconds."""
    mirror: str | None = None
    """An fsspec URL to which every committed checkpoint is uploaded."""
    include_untrained: bool = True
    """Also save weights that are not trained. False: each attempt takes them from the model's
    folder.
    """
    disk: str = "trainer.checkpoint.store.disk:Disk"
    """``module:class`` of all operations on files; tests inject faults here."""

    @classmethod
    def from_config(
        cls,
        trainer: Trainer,
        *,
        best_metric: str | None,
        best_mode: Literal["max", "min"],
        include_untrained: bool,
    ) -> CheckpointSettings:
        """Settings by ``trainer`` and ``trainer.checkpoint``.

        The metric and its mode are given, since their defaults depend on what the run validates.
        """
        checkpoint = trainer.checkpoint
        return cls(
            keep_last=checkpoint.keep_last,
            keep_every=checkpoint.keep_every,
            keep_best=checkpoint.keep_best,
            best_metric=best_metric,
            best_mode=best_mode,
            write_share=checkpoint.write_share,
            async_save=checkpoint.async_save,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            val_only=trainer.val_only,
            mirror=trainer.default_hdfs_dir,
            include_untrained=include_untrained,
        )
