"""Checks the command line before Hydra composes: all unknown keys at once, verl's other spellings
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
from trainer.config.checks.problems import raise_problems, unknown_key
from trainer.config.keys import verl
from trainer.config.keys.conf_tree import conf_dir, config_groups
from trainer.config.keys.tree import NOT_SETTINGS, format_value, in_open_group, is_known, known_keys

HYDRA_OVERRIDES = (
    "hydra.run.dir=.",
    "hydra.output_subdir=null",
    "hydra/job_logging=none",
    "hydra/hydra_logging=none",
)
"""Added to every command line: Hydra leaves no folders and no log files of its own."""
SWEEP_DIR = "hydra.sweep.dir=runs/${trainer.project_name}/sweep-${now:%Y%m%d-%H%M%S}"
"""The folder of a sweep, unless the command line sets it."""
LAUNCHER = "hydra/launcher=slurm"
"""The launcher of a sweep, unless the command line sets it."""
SWEEPER = "hydra/sweeper=grid"
"""The sweeper, unless the command line sets it."""
_READ_BY_JOBS = re.compile(r"[+~]*(cluster|container|hydra[./](launcher|sweep|sweeper))[./=@]")


@dataclass(frozen=True)
class CommandLine:
    """A checked command line."""

    argv: list[str]
    """Arguments for Hydra."""
    multirun: bool


def check_overrides(argv: Sequence[str], *, starts_run: bool = True) -> CommandLine:
    """The command line for Hydra.

    Raises UserError with every unknown key, every override that cannot be read, and, where it
    ``starts_run`` on this machine, those that only jobs on Slurm read.
    """
    flags = get_args_parser().parse_intermixed_args(list(argv))
    groups = config_groups([conf_dir(), *_folders(flags.config_path, flags.config_dir)])
    problems, checked = _check_all(flags.overrides, groups)
    if starts_run and not (flags.multirun or flags.cfg or flags.info):
        problems += _read_by_jobs_only(checked)
    raise_problems(problems + _contradictions(checked))
    options = _remove_overrides(argv, flags.overrides)
    added = list(HYDRA_OVERRIDES)
    if flags.multirun and not _sets(checked, "hydra/launcher"):
        added.append(LAUNCHER)
    if flags.multirun and not _sets(checked, "hydra/sweeper"):
        added.append(SWEEPER)
    if flags.multirun and not _sets(checked, "hydra.sweep.dir"):
        added.append(SWEEP_DIR)
    if flags.config_path is not None:
        added.append(f"hydra.searchpath=['file://{conf_dir()}']")
        options = [_absolute_folder(text, flags.config_path) for text in options]
    return CommandLine(argv=[*options, *added, *checked], multirun=flags.multirun)


def _check_all(texts: Sequence[str], groups: dict[str, list[str]]) -> tuple[list[str], list[str]]:
    """Problems, and the overrides as Hydra shall see them, without those that change nothing."""
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
    return problems, checked


def _check_one(
    override: Override, text: str, groups: dict[str, list[str]]
) -> tuple[str | None, str]:
    """A problem or None, and the override as Hydra shall see it."""
    key = override.key_or_group
    top = key.partition(".")[0]
    if "/" in key or top == "hydra" or (top in NOT_SETTINGS and "." in key):
        return None, text
    if key in groups and not override.is_delete():
        return _check_choice(key, override.value(), groups[key]), text
    if key in verl.ALIASES:
        return None, _renamed(key, text)
    if not is_known(key):
        return unknown_key(key) if "." in key or key not in groups else None, text
    if override.is_delete():
        return (
            f"~{key}: settings can't be taken away; set {key}=null, or leave it out for its "
            "default",
            text,
        )
    if in_open_group(key):
        return None, "++" + text.lstrip("+")
    return None, text.lstrip("+") if override.is_add() else text


def _check_choice(group: str, value: object, choices: list[str]) -> str | None:
    if not isinstance(value, str) or value in choices:
        return None
    return (
        f"{group}={value}: there is no such choice{nearest(value, choices)} ({', '.join(choices)})"
    )


def _renamed(alias: str, text: str) -> str:
    value = text.partition("=")[2]
    if (alias, value) in verl.ALIAS_VALUES:
        value = format_value(verl.ALIAS_VALUES[alias, value])
    return f"{verl.ALIASES[alias]}={value}"


def _contradictions(texts: list[str]) -> list[str]:
    """Keys that are set twice with different values, such as a key and its other spelling."""
    seen: dict[str, str] = {}
    problems = []
    for text in texts:
        key, _, value = text.lstrip("+~").partition("=")
        if key in known_keys() and seen.setdefault(key, value) != value:
            problems.append(f"{key} is set twice: {seen[key]} and {value}")
    return problems


def _read_by_jobs_only(texts: list[str]) -> list[str]:
    """Without ``-m`` the run is on this machine, in this interpreter."""
    for_jobs = [text for text in texts if _READ_BY_JOBS.match(text)]
    if not for_jobs:
        return []
    return [
        f"{', '.join(for_jobs)}: read by jobs only; type python -m trainer -m ... to start one, or "
        "leave it out"
    ]


def _unreadable(text: str, error: Exception) -> str:
    if "=" not in text:
        return (
            f"'{text}' is no override; write KEY=VALUE{nearest(text, known_keys())} (--help "
            "shows examples)"
        )
    detail = str(error).splitlines()[0]
    return (
        f"'{text}' can't be read ({detail}); quote values with special characters: 'KEY=\"VALUE\"'"
    )


def _sets(texts: list[str], key: str) -> bool:
    return any(text.lstrip("+").partition("=")[0].partition("@")[0] == key for text in texts)


def _folders(*paths: str | None) -> list[Path]:
    return [Path(path) for path in paths if path is not None and os.path.isdir(path)]


def _remove_overrides(argv: Sequence[str], overrides: Sequence[str]) -> list[str]:
    """``argv`` without the overrides, which come in the same order."""
    options: list[str] = []
    remaining = list(overrides)
    for text in argv:
        if remaining and text == remaining[0]:
            remaining.pop(0)
        else:
            options.append(text)
    return options


def _absolute_folder(text: str, config_path: str) -> str:
    """``text`` as an absolute path when it is the folder of ``--config-path``: Hydra would look
    for a relative one next to this package.
    """
    return os.path.abspath(text) if text == config_path and os.path.isdir(text) else text
