"""Where the Hydra tree lies and what its groups are. Standard library only."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def conf_dir() -> Path:
    """The Hydra tree: inside an installed package, or beside the package in a checkout."""
    package = Path(__file__).resolve().parents[2]
    installed = package / "conf"
    return installed if (installed / "config.yaml").is_file() else package.parent / "conf"


def config_groups(folders: Sequence[Path]) -> dict[str, list[str]]:
    """Hydra group (``parallel``) -> names of its choices, in all ``folders``."""
    found: dict[str, list[str]] = {}
    for folder in folders:
        for file in sorted(folder.rglob("*.yaml")):
            group = file.parent.relative_to(folder).as_posix()
            if group != ".":
                found.setdefault(group, []).append(file.stem)
    return found
