"""In which settings runs differ, and which of them are one setting with several seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from jobs.ledger import Entry
from jobs.submit.report import plain
from trainer.base.json_files import read_regular
from trainer.base.yaml_files import MOST_BYTES, MOST_NODES

NAMES_OF_A_RUN = ("trainer.default_local_dir", "trainer.experiment_name", "trainer.project_name")
"""Settings that name a run and do not change it."""
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Settings = Mapping[str, str]
"""Dotted key -> value as text."""


def differing(entries: Sequence[Entry]) -> list[Settings]:
    """The settings of each run that not all runs share, the names of runs aside.

    From the overrides when every run has some, else from the frozen ``config.yaml``; a run of an
    older version, whose file lacks a key, shows ``-`` for it.
    """
    if all(entry.overrides for entry in entries):
        found = [_of_overrides(entry.overrides) for entry in entries]
    else:
        found = [_of_config(Path(entry.run) / "config.yaml") for entry in entries]
    keys = list(dict.fromkeys(key for settings in found for key in settings))
    varying = [
        key
        for key in keys
        if key not in NAMES_OF_A_RUN and len({settings.get(key) for settings in found}) > 1
    ]
    return [{key: settings.get(key, "-") for key in varying} for settings in found]


def is_seed(key: str) -> bool:
    """Whether a setting is a seed: ``seed``, ``data.seed``, ``trainer.rollout_seed``."""
    last = key.rpartition(".")[2]
    return last == "seed" or last.endswith("_seed")


def without_seed(settings: Settings) -> tuple[tuple[str, str], ...]:
    """What runs have in common that are one setting."""
    return tuple((key, value) for key, value in settings.items() if not is_seed(key))


def _of_overrides(overrides: Sequence[str]) -> Settings:
    pairs = (plain(override).partition("=") for override in overrides)
    return {key.lstrip("+"): value for key, _, value in pairs}


def _of_config(path: Path) -> Settings:
    """The frozen settings, flat; none where the file isn't there or isn't YAML."""
    if not path.is_file():
        return {}
    flat: dict[str, str] = {}
    try:
        data = read_regular(path, MOST_BYTES)
        _flatten(yaml.load(data, Loader=_LOADER), "", flat)  # noqa: S506
    except (OSError, ValueError, RecursionError, yaml.YAMLError):
        return {}
    return flat


def _flatten(values: Any, prefix: str, flat: dict[str, str]) -> None:
    """Raises ValueError for aliases that make more of a file than any settings are."""
    if not isinstance(values, dict):
        if len(flat) >= MOST_NODES:
            raise ValueError(prefix)
        flat[prefix] = str(values)
        return
    for key, value in values.items():
        _flatten(value, f"{prefix}.{key}" if prefix else str(key), flat)
