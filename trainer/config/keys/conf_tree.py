"""Where the Hydra tree ``conf/`` lies and which groups it has. No library is loaded."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import UserError

MOST_ENTRIES = 50_000
"""More files than any folder of settings, or of a run, has in its first levels."""
_DEEPEST = 3


def conf_dir() -> Path:
    """The Hydra tree: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "conf"
    return installed if (installed / "config.yaml").is_file() else package.parent / "conf"


def config_groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Hydra group (such as ``parallel``) -> names of its choices, over all ``folders``."""
    groups: dict[str, list[str]] = {}
    for folder in folders:
        for file in yaml_files(folder):
            group = file.parent.relative_to(folder).as_posix()
            if group != ".":
                groups.setdefault(group, []).append(file.stem)
    return groups


def yaml_files(folder: Path) -> list[Path]:
    """The YAML files of a folder of settings and of its groups, sorted.

    Raises UserError for a folder of far more than settings, which would take minutes to look
    through.
    """
    found: list[Path] = []
    seen = 0
    for root, folders, files in os.walk(folder):
        seen += len(folders) + len(files)
        if seen > MOST_ENTRIES:
            raise UserError(
                f"{folder} holds more than {MOST_ENTRIES} files: give a folder of settings with "
                "--config-path or --config-dir"
            )
        if len(Path(root).relative_to(folder).parts) >= _DEEPEST:
            folders.clear()
        found += [Path(root) / name for name in files if name.endswith(".yaml")]
    return sorted(found)
