"""Where the Hydra tree ``conf/`` lies and which groups it has. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def conf_dir() -> Path:
    """The Hydra tree: inside an installed package, or next to the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "conf"
    return installed if (installed / "config.yaml").is_file() else package.parent / "conf"


def config_groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Hydra group (such as ``parallel``) -> names of its choices, over all ``folders``."""
    groups: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if group != ".":
                groups.setdefault(group, []).append(file.stem)
    return groups
