"""The best checkpoint of a run, whole, the same on every rank."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from trainer.checkpoint.resume import on_rank_0, set_aside, verify
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store.catalog import Catalog
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.layout import step_dir
from trainer.checkpoint.store.manifest import Manifest
from trainer.checkpoint.store.retention import best_first
from trainer.ranks.world import World


def find_best(
    disk: Disk, root: Path, settings: CheckpointSettings, world: World
) -> tuple[Path, Manifest] | None:
    """The healthy checkpoint with the best ``settings.best_metric``, verified; None without one.
    Collective.

    A damaged one is renamed ``.corrupt`` and the next best is taken. Raises as
    ``find_checkpoint`` does for one that can't be read.
    """
    while True:
        steps: list[int] = on_rank_0(partial(_steps, root, settings), world)
        if not steps:
            return None
        folder = step_dir(root, steps[0])
        manifest, problems = verify(folder, world)
        if manifest is not None and not problems:
            return folder, manifest
        on_rank_0(partial(set_aside, disk, folder, problems), world)


def _steps(root: Path, settings: CheckpointSettings) -> list[int]:
    """Steps of the healthy checkpoints that have the metric, the best first."""
    metrics = {
        step: manifest.metric
        for step, manifest in Catalog(root).checkpoints().items()
        if manifest.healthy and manifest.metric_name == settings.best_metric
    }
    return best_first(list(metrics), metrics, settings.best_mode)
