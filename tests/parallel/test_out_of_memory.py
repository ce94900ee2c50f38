"""A rank runs out of memory: the step still has the gradient it would have had, and no rank is left
waiting.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.ranks import distance, logs, results, start

PLAIN: list[dict[str, Any]] = [{"zero": z, "budget": 1024} for z in range(3)]
SURVIVED: list[dict[str, Any]] = [
    {"zero": 0, "budget": 1024, "fail": [0, 0, "forward"]},
    {"zero": 0, "budget": 1024, "fail": [1, 1, "backward"]},
    {"zero": 1, "budget": 1024, "fail": [1, 0, "forward"]},
    {"zero": 1, "budget": 1024, "fail": [0, 1, "forward"]},
    {"zero": 1, "budget": 1024, "fail": [0, 0, "backward"]},
    {"zero": 1, "budget": 1024, "fail": [0, 1, "backward"]},
    {"zero": 2, "budget": 1024, "fail": [1, 0, "forward"]},
    {"zero": 2, "budget": 1024, "fail": [0, 1, "forward"], "share": True},
    {"zero": 2, "budget": 512, "fail": [1, 2, "forward"]},
]
FATAL: list[dict[str, Any]] = [
    {"zero": 3, "budget": 1024, "fail": [1, 0, "forward"]},
    {"zero": 2, "budget": 1024, "fail": [1, 0, "backward"]},
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return results([*PLAIN, *SURVIVED], tmp_path_factory.mktemp("ranks"), 2)


@pytest.mark.parametrize(
    "number", range(len(SURVIVED)), ids=[f"{v['zero']}-{v['fail']}" for v in SURVIVED]
)
def test_the_gradient_is_as_without_the_error(found: list[dict[str, Any]], number: int) -> None:
    variant, whole = SURVIVED[number], found[0]
    one = found[len(PLAIN) + number]
    assert distance(one["gradient"], whole["gradient"]) <= 1e-5
    assert one["loss"] == pytest.approx(whole["loss"], rel=1e-5)
    assert one["norm"] == pytest.approx(whole["norm"], rel=1e-5)
    failed, _, _ = variant["fail"]
    budgets = one["lowered"][0]
    assert budgets[failed] < variant["budget"] and budgets[1 - failed] == variant["budget"]
    assert all(mine == budgets for mine in one["lowered"]), "every rank knows"
    if variant["zero"] == 2:
        assert len(set(one["counts"])) == 1


def test_nothing_is_lowered_without_an_error(found: list[dict[str, Any]]) -> None:
    assert [one["lowered"] for one in found[: len(PLAIN)]] == [None] * len(PLAIN)


@pytest.mark.parametrize("variant", FATAL, ids=[f"{v['zero']}-{v['fail']}" for v in FATAL])
def test_where_the_others_already_wait_every_rank_ends_with_an_error(
    variant: dict[str, Any], tmp_path: Path
) -> None:
    codes = start({"variants": [variant]}, tmp_path, 2, timeout_s=300)
    assert codes == [1, 1], logs(tmp_path)
    assert "OutOfMemoryError: injected" in (tmp_path / f"rank_{variant['fail'][0]}.log").read_text()
