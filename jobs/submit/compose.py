"""Compose the jobs of a sweep: Hydra composes once for each choice of groups, and the values that a
job sets are put into a copy of that. Equal to what Hydra composes for each job by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import filter_overrides
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from jobs.submit.launch import Point
from jobs.submit.report import plain
from trainer.base.masking import mask
from trainer.config.checks.problems import raise_problems, with_key
from trainer.config.keys import dotted
from trainer.config.keys.interpolation import NotPlain, copy, resolve

HYDRAS_SUBDIR = "${hydra.job.num}"
"""Hydra's default of ``hydra.sweep.subdir``; our own folders say what they hold."""
_SUBDIR = "hydra.sweep.subdir="
_ERRORS = (OmegaConfBaseException, HydraException)


def compose_points(
    config: DictConfig,
    context: HydraContext,
    job_overrides: Sequence[Sequence[str]],
    first: int,
    done: Callable[[int], None],
) -> list[Point]:
    """The points of a sweep, with the indices from ``first`` on. ``done`` is called with the number
    of those that are composed.

    Raises UserError with a message for each job that can't be composed, equal ones once.
    """
    composer = SweepComposer(config, context)
    points: list[Point] = []
    wrong: dict[str, str] = {}
    for index, overrides in enumerate(job_overrides, start=first):
        shown = tuple(mask(plain(one)) for one in filter_overrides(overrides))
        try:
            values = composer.compose(overrides, index)
            subdir = composer.subdir(overrides, index)
            points.append(Point(index=index, overrides=shown, config=values, subdir=subdir))
        except _ERRORS as error:
            reason = message_of(error)
            wrong.setdefault(reason, f"job {index} ({' '.join(shown)}): {reason}")
        done(index - first + 1)
    raise_problems(list(wrong.values()))
    return points


def message_of(error: Exception) -> str:
    """The first line of what Hydra or OmegaConf says, with that of its cause."""
    lines = [[with_key(error)]]
    if error.__cause__ is not None:
        lines.append(str(error.__cause__).strip().splitlines())
    return "; ".join(dict.fromkeys(text[0] for text in lines if text))


class SweepComposer:
    """Composes jobs that share the command line's own settings."""

    def __init__(self, config: DictConfig, context: HydraContext) -> None:
        self.config = config
        self.context = context
        sweep: Any = OmegaConf.to_container(config.hydra.sweep, resolve=False)
        typed: Any = OmegaConf.to_container(config.hydra.overrides.hydra, resolve=False)
        self._sets_subdir = sweep["subdir"] != HYDRAS_SUBDIR or _types_subdir(typed)
        self._bases: dict[tuple[str, ...], dict[str, Any] | Exception] = {}

    def compose(self, overrides: Sequence[str], index: int) -> dict[str, Any]:
        """All values of one job, resolved, as a new tree.

        Raises HydraException or OmegaConfBaseException.
        """
        changes, others = _split(overrides)
        try:
            base = self._base(others)
        except _ERRORS:
            if not changes:
                raise
            return self._by_hydra(overrides, index)  # whose error may depend on the values
        if not all(_is_leaf(base, key) for key in changes):
            return self._by_hydra(overrides, index)
        tree = copy(base)
        for key, value in changes.items():
            dotted.put(tree, key, value)
        try:
            return resolve(tree)
        except NotPlain:
            return self._by_hydra(overrides, index)

    def subdir(self, overrides: Sequence[str], index: int) -> str | None:
        """``hydra.sweep.subdir`` of one job; None when it wasn't set.

        Raises HydraException or OmegaConfBaseException.
        """
        if not self._sets_subdir and not _types_subdir(overrides):
            return None
        with self._composed_by_hydra(overrides, index) as composed:
            return str(composed.hydra.sweep.subdir)

    def _base(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        """What Hydra composes with ``overrides``, unresolved and without its own settings."""
        if overrides not in self._bases:
            try:
                self._bases[overrides] = self._composed_once(overrides)
            except _ERRORS as error:
                self._bases[overrides] = error
        base = self._bases[overrides]
        if isinstance(base, Exception):
            raise base
        return base

    def _composed_once(self, overrides: tuple[str, ...]) -> dict[str, Any]:
        composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(composed):
            del composed["hydra"]
        return _plain(OmegaConf.to_container(composed, resolve=False))

    def _by_hydra(self, overrides: Sequence[str], index: int) -> dict[str, Any]:
        """One job composed by Hydra alone: for what refers to Hydra's own settings, such as the
        number of the job.
        """
        with self._composed_by_hydra(overrides, index) as composed:
            with open_dict(composed):
                del composed["hydra"]
            return _plain(OmegaConf.to_container(composed, resolve=True))

    @contextlib.contextmanager
    def _composed_by_hydra(self, overrides: Sequence[str], index: int) -> Iterator[DictConfig]:
        """What Hydra composes, unresolved; it is Hydra's current one within the block."""
        try:
            composed = self.context.config_loader.load_sweep_config(self.config, list(overrides))
            with open_dict(composed):
                composed.hydra.job.id = f"job_{index}"
                composed.hydra.job.num = index
            HydraConfig.instance().set_config(composed)
            yield composed
        finally:
            HydraConfig.instance().set_config(self.config)


def _types_subdir(overrides: Sequence[str]) -> bool:
    return any(text.lstrip("+").startswith(_SUBDIR) for text in overrides)


def _plain(tree: Any) -> dict[str, Any]:
    assert isinstance(tree, dict)
    return {str(name): value for name, value in tree.items()}


def _split(overrides: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Values that are set, by key, and the other overrides: groups, additions, whole sections, and
    values within such a section, whose order counts. Nothing is split beside a deletion, which
    looks at values.
    """
    changes: dict[str, Any] = {}
    others: list[str] = []
    sections: list[str] = []
    for text in overrides:
        override = _parsed(text)
        if override.is_delete():
            return {}, tuple(overrides)
        key = override.key_or_group
        if _sets_value(override) and not any(key.startswith(f"{name}.") for name in sections):
            changes[key] = override.value()
            continue
        others.append(text)
        sections.append(key)
    if any(key.startswith(f"{name}.") or key == name for key in changes for name in sections):
        return {}, tuple(overrides)
    return changes, tuple(others)


def _sets_value(override: Override) -> bool:
    """Whether it sets a key to a plain value or a list of them: no group has a dot in its name."""
    key = override.key_or_group
    if "." not in key or "/" in key or key.startswith("hydra.") or override.package is not None:
        return False
    if override.is_add() or override.is_force_add() or override.is_delete():
        return False
    return not override.is_sweep_override() and _is_plain_value(override.value())


def _is_plain_value(value: Any) -> bool:
    if isinstance(value, list):
        return all(_is_plain_value(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str)


@lru_cache(maxsize=4096)
def _parsed(text: str) -> Override:
    return OverridesParser.create().parse_override(text)


def _is_leaf(tree: Mapping[str, Any], key: str) -> bool:
    """Whether ``key`` is there and is no group of keys: Hydra refuses other keys, and merges."""
    node: Any = tree
    for part in key.split("."):
        if not isinstance(node, Mapping) or part not in node:
            return False
        node = node[part]
    return not isinstance(node, Mapping)
