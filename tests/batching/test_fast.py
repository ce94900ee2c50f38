"""Compiled loops make the plans that plain Python makes, to the last bit, and nobody needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.batching import (
    CostModel,
    Plan,
    balance_ranks,
    fast,
    packing,
    plan,
    refine,
    search,
    warm_up,
)
from trainer.batching.search import improve


def _case(seed: int) -> dict[str, Any]:
    """Arguments of plan(): any of its features, in any combination."""
    rng = np.random.default_rng(seed)
    count, ranks = int(rng.integers(2, 220)), int(rng.integers(1, 12))
    groups = np.sort(rng.integers(0, max(1, count // 5), count))
    prompts = rng.integers(0, 300, int(groups.max()) + 1)[groups]
    kind = int(rng.integers(3))
    responses = [
        rng.lognormal(5, 1, count).astype(int) + 1,
        rng.integers(1, 500, count),
        np.full(count, 77),
    ][kind]
    lengths = prompts + responses
    budgets = (lengths.max() * rng.uniform(1.0, rng.choice([1.0, 1.1, 4.0]), ranks)).astype(int)
    return {
        "lengths": lengths,
        "budget": budgets if rng.random() < 0.4 else int(budgets.max()),
        "ranks": ranks,
        "sync": str(rng.choice(["micro", "step"])),
        "cost": CostModel(
            1.0, float(rng.choice([0.0, 1e-4, 1e-2])), float(rng.choice([0.0, 50.0]))
        ),
        "groups": groups,
        "prompt_lengths": prompts,
        "buckets": [100, 400] if rng.random() < 0.2 else None,
        "bucket_by": "total",
        "keep_groups": bool(rng.random() < 0.2),
        "share_prompts": bool(rng.random() < 0.4),
    }


def _plain(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(fast, "load", lambda _: None)
        return make()


def _same(a: Plan, b: Plan) -> bool:
    lists = [[mb.tolist() for rank in p.micro_batches for mb in rank] for p in (a, b)]
    return lists[0] == lists[1] and (a.tokens, a.costs, a.critical_path) == (
        b.tokens,
        b.costs,
        b.critical_path,
    )


@pytest.mark.timeout(180)
def test_plans_are_those_of_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of these tests to run on a machine compiles, for half a minute."""
    monkeypatch.setattr(fast, "FROM", 1)
    for seed in range(120):
        case = _case(seed)
        assert _same(plan(**case), _plain(monkeypatch, lambda case=case: plan(**case))), (
            f"seed {seed}"
        )


def test_balanced_ranks_are_those_of_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast, "FROM", 1)
    for seed in range(20):
        costs = np.random.default_rng(seed).lognormal(6, 1, 10 + 9 * seed)
        parts = [p.tolist() for p in balance_ranks(costs, 2 + seed % 5)]
        plain = _plain(
            monkeypatch, lambda costs=costs, seed=seed: balance_ranks(costs, 2 + seed % 5)
        )
        assert parts == [p.tolist() for p in plain]


def test_a_bin_takes_more_units_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks with equally many units one has all the load; half of it moves, and arrays
    grow.
    """
    monkeypatch.setattr(fast, "FROM", 1)
    cost = np.append(np.ones(40), np.full(40, 1e-3))
    zero, budgets = np.zeros(80, np.int64), np.ones(2, np.int64)

    def level() -> np.ndarray:
        bins = np.repeat([0, 1], 40)
        return improve(bins, cost, zero, zero, budgets, 1, 1.001 * float(cost.sum()) / 2)

    even = level()
    assert np.array_equal(even, _plain(monkeypatch, level))
    assert np.bincount(even).max() > 50


def test_constants_are_the_same() -> None:
    here = {"packing": [packing], "refine": [refine, search]}
    for module, known in here.items():
        loops = fast.load(module)
        assert loops is not None
        for name in (n for n in vars(loops) if n.isupper()):
            assert getattr(loops, name) in [getattr(k, name) for k in known if hasattr(k, name)]


def test_warming_up_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of any kind find what they run on."""
    monkeypatch.setattr(fast, "FROM", 1)
    warm_up(fast.FROM)
    called = {
        "packing": ("best_fit", "lightest_fit", "open_bins", "cuts", "once", "path", "fill_rows"),
        "refine": ("improve",),
    }
    loops = [getattr(fast.load(module), name) for module, names in called.items() for name in names]
    ready = [list(each.signatures) for each in loops]
    assert all(ready)
    for seed in range(40):
        plan(**_case(seed))
    balance_ranks(np.arange(200.0)[::-2], 3)
    assert [list(each.signatures) for each in loops] == ready


def test_numba_is_left_alone_until_a_plan_is_large() -> None:
    code = (
        "import sys; from trainer.batching import plan, warm_up; warm_up(63); plan(range(1, 64), "
        "99, 2); "
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_compiled_code_is_kept_where_nobody_else_writes(tmp_path: Path) -> None:
    code = "from trainer.batching.fast import load; assert load('packing')"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_code_of_somebody_else_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    jit = fast.load("jit")
    assert jit is not None
    monkeypatch.setattr(jit.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="somebody else"):
        jit.keep_private(tmp_path)


def test_what_was_compiled_of_other_sources_is_forgotten(tmp_path: Path) -> None:
    """Also when only a loop has changed that is part of others."""
    jit = fast.load("jit")
    assert jit is not None
    kept, other = (
        tmp_path / "packing.fill_rows-1.py311.nbi",
        tmp_path / "somebody.fill_rows-1.py311.nbi",
    )
    keep_current = jit.keep_current.__wrapped__
    for mark, left in ((None, False), ("of other sources", False), ("of these", True)):
        kept.touch()
        other.touch()
        if mark == "of other sources":
            (tmp_path / "plimsoll-sources").write_text(mark)
        keep_current(tmp_path)
        assert (kept.exists(), other.exists()) == (left, True)
    assert sorted(p.name for p in tmp_path.iterdir()) == [kept.name, "plimsoll-sources", other.name]


@pytest.mark.parametrize(
    "error", [ModuleNotFoundError("numba"), RuntimeError("no locator available")]
)
def test_without_numba_or_a_cache_folder_plain_python_plans(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(fast, "import_module", fail)
    monkeypatch.setattr(fast, "load", fast.load.__wrapped__)
    assert fast.loops("packing", 1000) is None
    assert plan(range(100, 200), 400, 4).efficiency > 0.9
