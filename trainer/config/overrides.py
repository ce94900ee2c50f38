"""Checks the command line before Hydra composes: all unknown keys at once, other spellings
renamed.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer.base.errors import nearest
from trainer.config.checks.problems import raise_all, unknown_key
from trainer.config.keys import tree as keys
from trainer.config.keys import verl
from trainer.config.keys.conf_tree import conf_dir, config_groups

STANDING = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
"""Hydra leaves no folders and no log files of its own."""
SWEEP_DIR = "hydra.sweep.dir=runs/${trainer.project_name}/sweep-${now:%Y%m%d-%H%M%S}"
"""Folder of a sweep."""
LAUNCHER = "hydra/launcher=slurm"
"""Where a sweep goes."""


@dataclass(frozen=True)
class CommandLine:
    """A checked command line."""

    argv: list[str]
    """Arguments for Hydra."""
    multirun: bool


def check(argv: Sequence[str], *, runs: bool = True) -> CommandLine:
    """The command line for Hydra. Raises UserError with every unknown key, every override that
    cannot be read, and, for one that ``runs`` here, those that only jobs on Slurm read.
    """
    flags = get_args_parser().parse_intermixed_args(list(argv))
    rest, texts = _without(argv, flags.overrides), list(flags.overrides)
    groups = config_groups([conf_dir(), *_folders(flags.config_path, flags.config_dir)])
    problems: list[str] = []
    checked: list[str] = []
    for text in texts:
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            problems.append(_unreadable(text, error))
            continue
        if verl.is_redundant(override.key_or_group, text.partition("=")[2]):
            continue
        problem, renamed = _check_one(override, text, groups)
        problems += [problem] if problem else []
        checked.append(renamed)
    if runs and not (flags.multirun or flags.cfg or flags.info):
        problems += _for_jobs_only(checked)
    raise_all(problems + _contradictions(checked))
    standing = list(STANDING)
    if flags.multirun:
        standing += [LAUNCHER] if not _sets(checked, "hydra/launcher") else []
        standing += [SWEEP_DIR] if not _sets(checked, "hydra.sweep.dir") else []
    if flags.config_path is not None:
        standing.append(f"hydra.searchpath=['file://{conf_dir()}']")
        rest = [
            os.path.abspath(text) if text == flags.config_path and os.path.isdir(text) else text
            for text in rest
        ]
    return CommandLine(argv=[*rest, *standing, *checked], multirun=flags.multirun)


def _check_one(
    override: Override, text: str, groups: dict[str, list[str]]
) -> tuple[str | None, str]:
    """A problem or None, and the override as Hydra shall see it."""
    key = override.key_or_group
    top = key.partition(".")[0]
    if "/" in key or top == "hydra" or (top in keys.NOT_SETTINGS and "." in key):
        return None, text
    if key in groups and not override.is_delete():
        return _check_choice(key, override.value(), groups[key]), text
    if key in verl.ALIASES:
        return None, _renamed(override, key, text)
    if not keys.is_known(key):
        return unknown_key(key) if "." in key or key not in groups else None, text
    if override.is_delete():
        return (
            f"~{key}: settings can't be taken away; set {key}=null, or leave it out for its "
            "default",
            text,
        )
    if override.is_add() and not any(key.startswith(f"{name}.") for name in keys.OPEN_KEYS):
        return None, text.lstrip("+")
    if any(key.startswith(f"{name}.") for name in keys.OPEN_KEYS):
        return None, "++" + text.lstrip("+")
    return None, text


def _check_choice(group: str, value: object, choices: list[str]) -> str | None:
    if not isinstance(value, str) or value in choices:
        return None
    return (
        f"{group}={value}: there is no such choice{nearest(value, choices)} ({', '.join(choices)})"
    )


def _renamed(override: Override, alias: str, text: str) -> str:
    value = text.partition("=")[2]
    other = verl.ALIAS_VALUES.get((alias, value))
    return f"{verl.ALIASES[alias]}={value if other is None else keys.written(other)}"


def _contradictions(texts: list[str]) -> list[str]:
    """Keys that are set twice with different values, such as a key and its other spelling."""
    seen: dict[str, str] = {}
    problems = []
    for text in texts:
        key, _, value = text.lstrip("+~").partition("=")
        if key in keys.known_keys() and seen.setdefault(key, value) != value:
            problems.append(f"{key} is set twice: {seen[key]} and {value}")
    return problems


def _for_jobs_only(texts: list[str]) -> list[str]:
    """Without ``-m`` the run is this machine's, in this interpreter."""
    found = [
        t
        for t in texts
        if re.match(r"[+~]*(cluster|container|hydra[./](launcher|sweep|sweeper))[./=@]", t)
    ]
    if not found:
        return []
    return [
        f"{', '.join(found)}: read by jobs only; type python -m trainer -m ... to start one, or "
        "leave it out"
    ]


def _unreadable(text: str, error: Exception) -> str:
    if "=" not in text:
        return f"'{text}' is no override; write KEY=VALUE{nearest(text, keys.known_keys())} (--help shows examples)"
    detail = str(error).splitlines()[0]
    return (
        f"'{text}' can't be read ({detail}); quote values with special characters: 'KEY=\"VALUE\"'"
    )


def _sets(texts: list[str], key: str) -> bool:
    return any(text.lstrip("+").partition("=")[0].partition("@")[0] == key for text in texts)


def _folders(*paths: str | None) -> list[Path]:
    return [Path(path) for path in paths if path is not None and os.path.isdir(path)]


def _without(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """``argv`` without the overrides, which come in the same order."""
    rest, left = [], list(overrides)
    for text in argv:
        if left and text == left[0]:
            left.pop(0)
        else:
            rest.append(text)
    return rest
