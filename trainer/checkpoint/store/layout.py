"""Names in the folder of checkpoints, and what a look into it tells.

A folder is a checkpoint exactly when it is named ``step_N`` and its manifest verifies. ``latest``
is a hint for people and other tools.
"""

from __future__ import annotations

import re
from pathlib import Path

from trainer.base.json_files import read_word
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.manifest import DamagedError, Manifest

FOLDER = "checkpoints"
"""The folder of checkpoints in a run folder."""
LATEST = "latest"
_STEP = re.compile(r"step_(\d+)")


def step_dir(root: Path, step: int) -> Path:
    """The folder of the committed checkpoint of ``step``."""
    return root / f"step_{step}"


def temp_dir(root: Path, step: int, fence: str) -> Path:
    """The folder in which the checkpoint of ``step`` is written before its commit.

    ``fence`` (the attempt and a random part) differs between attempts: an orphaned writer of an
    earlier attempt, which may still be running, never touches what this attempt publishes.
    """
    return root / f"step_{step}.tmp-{fence}"


def steps_on_disk(root: Path) -> list[int]:
    """Steps of the folders named ``step_N``, newest first."""
    steps = []
    try:
        for path in root.iterdir():
            match = _STEP.fullmatch(path.name)
            if match is not None and path.is_dir():
                steps.append(int(match[1]))
    except OSError:
        return []
    return sorted(steps, reverse=True)


def read_latest(root: Path) -> str | None:
    """The name of the folder that ``latest`` points to; None when the file holds no name."""
    return read_word(root / LATEST)


def newest_whole(root: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies completely; None when there is none.

    Raises UserError for a newer format.
    """
    for step in steps_on_disk(root):
        folder = step_dir(root, step)
        try:
            manifest = manifests.read(folder)
        except DamagedError:
            continue
        if not manifests.problems(folder, manifest):
            return folder, manifest
    return None
