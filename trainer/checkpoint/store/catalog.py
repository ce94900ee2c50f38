"""The committed checkpoints of a run, by their manifests."""

from __future__ import annotations

import contextlib
from pathlib import Path

from trainer.base.errors import UserError
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.layout import step_dir, steps_on_disk
from trainer.checkpoint.store.manifest import DamagedError, Manifest


class Catalog:
    """Reads each manifest once.

    A folder that is damaged, or named after another step than its manifest's, is not in it: it
    counts for nothing and is never removed.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._manifests: dict[int, Manifest] = {}
        self._whole: set[int] = set()

    def add(self, manifest: Manifest, *, whole: bool = True) -> None:
        """Record a checkpoint that this process has committed or verified."""
        self._manifests[manifest.step] = manifest
        if whole:
            self._whole.add(manifest.step)

    def checkpoints(self) -> dict[int, Manifest]:
        """Step -> manifest, oldest first. Raises OSError when the folder can't be read."""
        present = steps_on_disk(self._root)
        for step in present:
            if step not in self._manifests:
                with contextlib.suppress(DamagedError, UserError):
                    manifest = manifests.read(step_dir(self._root, step))
                    if manifest.step == step:
                        self._manifests[step] = manifest
        return {step: self._manifests[step] for step in sorted(present) if step in self._manifests}

    def is_whole(self, step: int) -> bool:
        """Whether the files of a checkpoint verify; they are read at most once.

        Raises OSError when one can't be read.
        """
        if step not in self._whole:
            folder = step_dir(self._root, step)
            if manifests.problems(folder, self._manifests[step]):
                return False
            self._whole.add(step)
        return True


def healthy_before(root: Path, step: int) -> list[Path]:
    """Checkpoints of applied optimizer steps from before ``step``, newest first."""
    checkpoints = Catalog(root).checkpoints()
    steps = [number for number, manifest in checkpoints.items() if manifest.healthy]
    return [step_dir(root, number) for number in reversed(steps) if number < step]
