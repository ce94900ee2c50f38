"""Checks the command line before Hydra composes: all unknown keys at once, verl's settings by their
names here.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from trainer.base.errors import first_line, nearest, shortened
from trainer.base.reward_rules import RULES
from trainer.config.keys.conf_tree import conf_dir, config_groups
from trainer.config.keys.tree import (
    NOT_SETTINGS,
    OPEN_KEYS,
    in_open_group,
    known_groups,
    known_keys,
)
from trainer.config.own_files import require_own_files
from trainer.config.verl.translate import (
    Translation,
    accepted_line,
    refusals,
    translate,
)

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
MOST_NESTED = 50
"""Brackets in brackets of a value: Hydra's parser takes a hundred frames of the stack for each."""
SWEEPER = "hydra/sweeper=grid"
"""The sweeper, unless the command line sets it."""
LAUNCHERS = ("slurm", "local")
"""Ours; another one would submit without checks, frozen settings, requeue and ledger."""
_RULE = re.compile(r"\+{0,2}reward\.rules\.([^=]+)=(.*)", re.DOTALL)
"""A rule of one data source, whose name may have slashes and dots."""
_SOURCE = re.compile(r"[\w/.*@?+|$%-]+(?: [\w/.*@?+|$%-]+)*")
"""Names that Hydra takes as keys of a dictionary."""
_READ_BY_JOBS = re.compile(r"[+~]*(cluster|container|hydra[./](launcher|sweep|sweeper))[./=@]")


@dataclass(frozen=True)
class CommandLine:
    """A checked command line."""

    argv: list[str]
    """Arguments for Hydra, without what is wrong in them."""
    multirun: bool
    problems: list[str]
    """One message for each mistake."""
    notes: list[str]
    """Lines for the user: settings that change nothing, and those given twice."""


@dataclass
class _Overrides:
    """The overrides as Hydra shall see them, and what is to be said about those typed."""

    texts: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    translations: dict[str, Translation] = field(default_factory=dict)
    """verl's settings that are not taken, as typed -> what they are here."""
    rules: dict[str, str] = field(default_factory=dict)
    """Data source -> rule, of ``reward.rules.SOURCE=RULE``."""


def check_overrides(argv: Sequence[str], *, starts_run: bool = True) -> CommandLine:
    """The command line for Hydra.

    Its problems are every unknown key, every override that cannot be read, and, where it
    ``starts_run`` on this machine, those that only jobs on Slurm read.
    """
    flags = get_args_parser().parse_intermixed_args(list(argv))
    folders = _folders(flags.config_path, flags.config_dir)
    require_own_files(folders, flags.config_name, flags.overrides)
    groups = config_groups([conf_dir(), *folders])
    overrides = _Overrides()
    for text in flags.overrides:
        _add_override(overrides, text, groups)
    if overrides.rules:
        listed = ",".join(f"{source}:{rule}" for source, rule in overrides.rules.items())
        overrides.texts.append(f"++reward.rules={{{listed}}}")
    problems = [*overrides.problems, *refusals(overrides.translations)]
    if starts_run and not (flags.multirun or flags.cfg or flags.info):
        problems += _read_by_jobs_only(overrides.texts)
    if flags.multirun:
        problems += _foreign_launchers(overrides.texts)
    texts, notes = _last_of_each_key(overrides.texts)
    accepted = accepted_line(overrides.translations)
    options = _remove_overrides(argv, flags.overrides)
    added = list(HYDRA_OVERRIDES)
    if flags.multirun and not _sets(texts, "hydra/launcher"):
        added.append(LAUNCHER)
    if flags.multirun and not _sets(texts, "hydra/sweeper"):
        added.append(SWEEPER)
    if flags.multirun and not _sets(texts, "hydra.sweep.dir"):
        added.append(SWEEP_DIR)
    if flags.config_path is not None:
        added.append(f"hydra.searchpath=['file://{conf_dir()}']")
        options = [_absolute_folder(text, flags.config_path) for text in options]
    return CommandLine(
        argv=[*options, *added, *texts],
        multirun=flags.multirun,
        problems=problems,
        notes=notes if accepted is None else [accepted, *notes],
    )


def _add_override(overrides: _Overrides, text: str, groups: dict[str, list[str]]) -> None:
    """Add the override ``text`` as Hydra shall see it, or what is wrong with it."""
    rule = _RULE.fullmatch(text)
    if rule is not None:
        _add_rule(overrides, text, source=rule[1], rule=rule[2])
        return
    try:
        if _nesting(text) > MOST_NESTED:
            raise RecursionError
        override = OverridesParser.create().parse_override(text)
    except (HydraException, ValueError, RecursionError, OverflowError) as error:
        overrides.problems.append(_unreadable(text, error))
        return
    key = override.key_or_group
    top = key.partition(".")[0]
    if "/" in key or top == "hydra" or (top in NOT_SETTINGS and "." in key):
        overrides.texts.append(text)
    elif key in groups and not override.is_delete():
        problem = _check_choice(key, override.value(), groups[key])
        if problem is None:
            overrides.texts.append(text)
        else:
            overrides.problems.append(problem)
    else:
        _add_setting(overrides, override, text)


def _add_rule(overrides: _Overrides, text: str, *, source: str, rule: str) -> None:
    """Add ``reward.rules.SOURCE=RULE``, or what is wrong with it. Hydra would take the dots of a
    source for groups of keys, and its slashes for a config group.
    """
    source = source.strip("\"'")
    rule = rule.strip("\"'")
    if not _SOURCE.fullmatch(source):
        overrides.problems.append(
            f"{text}: a data source of that name can't be typed; write it in a file, below "
            "reward: rules: (python -m trainer --config-dir DIR --config-name NAME)"
        )
    elif rule not in RULES:
        overrides.problems.append(
            f"reward.rules.{source}={rule}: there is no such rule{nearest(rule, RULES)} "
            f"({', '.join(RULES)}); to sweep over rules: "
            f"'reward.rules={{{source}:{RULES[0]}}},{{{source}:{RULES[2]}}}'"
        )
    else:
        overrides.rules[source] = rule


def _add_setting(overrides: _Overrides, override: Override, text: str) -> None:
    """Add a setting under its name here, unless it changes nothing or is not supported."""
    key = override.key_or_group
    found = translate(key, text.partition("=")[2])
    if found.outcome != "taken":
        overrides.translations[text.lstrip("+~")] = found
    elif override.is_delete():
        overrides.problems.append(
            f"~{key}: settings can't be taken away; set {key}=null, or leave it out for its default"
        )
    elif found.key in known_groups() and isinstance(override.value(), str | int | float):
        overrides.problems.append(f"{key}={found.value}: expected a group of keys")
    else:
        whole = override.value()
        if found.key == "reward.rules" and isinstance(whole, dict):
            for source, rule in whole.items():
                _add_rule(overrides, text, source=str(source), rule=str(rule))
            return
        prefix = "++" if in_open_group(found.key) or found.key in OPEN_KEYS else ""
        overrides.texts.append(f"{prefix}{found.key}={found.value}")


def _check_choice(group: str, value: object, choices: list[str]) -> str | None:
    if not isinstance(value, str) or value in choices:
        return None
    return (
        f"{group}={value}: there is no such choice{nearest(value, choices)} ({', '.join(choices)})"
    )


def _last_of_each_key(texts: list[str]) -> tuple[list[str], list[str]]:
    """Of each setting the last override, in their order; and a line for each that was given twice
    with different values.
    """
    last: dict[str, str] = {}
    notes: list[str] = []
    for text in texts:
        key, _, value = text.lstrip("+").partition("=")
        before = last.pop(key, None)
        last[key] = text
        earlier = None if before is None else before.partition("=")[2]
        if earlier is not None and earlier != value:
            notes.append(f"{key} is given twice: the last one, {value}, counts, not {earlier}")
    return list(last.values()), notes


def _foreign_launchers(texts: list[str]) -> list[str]:
    """A problem for a launcher that is none of ours."""
    problems = []
    for text in texts:
        key, _, value = text.lstrip("+~").partition("=")
        name = value.strip("'\"")
        is_choice = key.partition("@")[0] == "hydra/launcher" and name not in LAUNCHERS
        if is_choice or key == "hydra.launcher._target_":
            problems.append(
                f"{text}: this launcher would go round the trainer's checks, frozen settings and "
                "requeue; type hydra/launcher=slurm, or hydra/launcher=local for this machine"
            )
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


def _nesting(text: str) -> int:
    """Most brackets that are open at once; those in quotes count as well."""
    depth = 0
    deepest = 0
    for character in text:
        if character in "[{(":
            depth += 1
            deepest = max(deepest, depth)
        elif character in "]})":
            depth -= 1
    return deepest


def _unreadable(text: str, error: Exception) -> str:
    if "=" not in text:
        return (
            f"'{text}' is no override; write KEY=VALUE{nearest(text, known_keys())} (--help "
            "shows examples)"
        )
    detail = "it is nested too deeply"
    if not isinstance(error, RecursionError):
        detail = first_line(error)
    text = shortened(text)
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
