"""Every number of the settings has finite bounds, and every name is one line."""

from __future__ import annotations

import math
import time
from typing import Annotated, Any, get_args, get_origin

import pytest
from annotated_types import Ge, Gt, Le, Lt

from tests.config.helpers import minimal_settings, problems, put
from trainer.config.checks.batch_sizes import Sizes, violations
from trainer.config.keys.describe import _limits
from trainer.config.keys.fields import fields, setting_keys
from trainer.config.schema.base import MOST

HOSTILE = [math.nan, math.inf, -math.inf, 1e300, -1e300, 10**23, -(10**23)]
TEXTS = ["", "a\nb", "a\x00b", "\x1b[2J", "a\udcffb", "x" * 5000]
PROSE = {"data.system_prompt", "data.chat_template"}
"""Texts of any length and form."""


def _numbers(annotation: Any, metadata: Any = ()) -> list[tuple[type, list[Any]]]:
    """The number types inside of an annotation, each with its limits."""
    if get_origin(annotation) is Annotated:
        inner, *extra = get_args(annotation)
        return _numbers(inner, [*metadata, *extra])
    if annotation in (int, float):
        return [(annotation, _limits(metadata))]
    if get_origin(annotation) is dict:
        return []
    return [number for part in get_args(annotation) for number in _numbers(part)]


@pytest.mark.parametrize("key", setting_keys())
def test_every_number_has_bounds(key: str) -> None:
    field = fields()[key]
    for kind, limits in _numbers(field.annotation, field.metadata):
        low = [limit for limit in limits if isinstance(limit, Ge | Gt)]
        high = [limit for limit in limits if isinstance(limit, Le | Lt)]
        assert low and high, f"{key}: a {kind.__name__} without a lowest or a highest value"


def _with(key: str, value: Any) -> dict[str, Any]:
    return put(minimal_settings(), key, value)


@pytest.mark.parametrize("value", HOSTILE)
def test_no_number_beyond_them_is_accepted(value: float) -> None:
    for key in setting_keys():
        if key in PROSE or key == "data.apply_chat_template_kwargs":
            continue
        found = problems(_with(key, value))
        assert any(key in problem for problem in found), f"{key}={value} is accepted"


@pytest.mark.parametrize("value", TEXTS, ids=[repr(text[:9]) for text in TEXTS])
def test_no_name_of_several_lines_is_accepted(value: str) -> None:
    for key in setting_keys():
        if key in PROSE:
            continue
        found = problems(_with(key, value))
        assert any(key in problem for problem in found), f"{key}={value!r} is accepted"
        assert all(problem.isprintable() and len(problem) < 1000 for problem in found)


def test_the_nearest_sizes_of_huge_batches_are_found_at_once() -> None:
    start = time.process_time()
    for size in (10**9 + 7, MOST, 10**23 + 1):
        for micro in (None, 3, 10**6 + 3, 10**15 + 1):
            sizes = Sizes(
                world=7 * 8, train_batch_size=size, ppo_mini_batch_size=size, micro_batch_size=micro
            )
            assert violations(sizes)
    assert time.process_time() - start < 20  # 12 x 10 ms; by counting down it never ends
