"""Names in the folder of checkpoints, and what a look into it tells.

A folder is a checkpoint exactly when its manifest verifies and it is named ``step_N`` after the
manifest's step. ``latest`` is a hint for people and other tools.
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
_STEP = re.compile(r"step_(0|[1-9]\d*)")


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
    """Steps of the folders named ``step_N``, newest first; none when there is no such ``root``.

    Raises OSError when ``root`` can't be read: that it has no checkpoints is then not known.
    """
    steps = []
    try:
        for path in root.iterdir():
            step = step_of(path.name)
            if step is not None and path.is_dir():
                steps.append(step)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(steps, reverse=True)


def step_of(name: str) -> int | None:
    """The step in a checkpoint's name ``step_N``; None for other names."""
    match = _STEP.fullmatch(name)
    return None if match is None else int(match[1])


def read_latest(root: Path) -> str | None:
    """The name of the folder that ``latest`` points to; None when the file holds no name."""
    return read_word(root / LATEST)


def newest_whole(root: Path) -> tuple[Path, Manifest] | None:
    """The newest checkpoint that verifies completely; None when there is none.

    Raises UserError for a newer format, OSError when a file can't be read.
    """
    for step in steps_on_disk(root):
        folder = step_dir(root, step)
        try:
            manifest = manifests.read(folder)
        except DamagedError:
            continue
        if manifest.step == step and not manifests.problems(folder, manifest):
            return folder, manifest
    return None
