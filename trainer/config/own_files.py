"""Files of settings from elsewhere: ``--config-path`` and ``--config-dir``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.json_files import open_regular
from trainer.base.yaml_files import MOST_BYTES, TooManyValues, require_readable
from trainer.config.keys.conf_tree import yaml_files


def require_own_files(
    folders: Sequence[Path], config_name: str | None, overrides: Sequence[str]
) -> None:
    """Raises UserError, with file and line, for a file that the command line names and that is no
    YAML, and for any file that would grow without end.
    """
    chosen = {f"{(config_name or 'config').removesuffix('.yaml')}.yaml"}
    for text in overrides:
        group, _, choice = text.lstrip("+").partition("=")
        chosen.add(f"{group.partition('@')[0]}/{choice}.yaml")
    for folder in folders:
        for file in yaml_files(folder):
            if file.relative_to(folder).as_posix() in chosen:
                require_readable(file)
            elif _has_aliases(file):
                _require_finite(file)


def _has_aliases(file: Path) -> bool:
    try:
        with open_regular(file) as opened:
            text = opened.read(MOST_BYTES)
    except OSError:
        return False
    return b"&" in text and b"*" in text


def _require_finite(file: Path) -> None:
    """A file that isn't asked for may be anything but one that Hydra could not end to read."""
    try:
        require_readable(file)
    except TooManyValues:
        raise
    except UserError:
        return
