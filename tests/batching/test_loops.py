"""Compiled loops make the plans that plain Python makes, to the last bit, and nobody needs them."""

from __future__ import annotations

import os
import subprocess
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trainer.batching import CostModel, Plan, plan, warm_up
from trainer.batching.loops import accelerate, accelerated, primitives
from trainer.batching.loops.refine import improve


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


def _interpreted(monkeypatch: pytest.MonkeyPatch, make: Callable[[], Any]) -> Any:
    with monkeypatch.context() as patch:
        patch.setattr(accelerate, "compiled_loops", lambda: None)
        return make()


def _same(a: Plan, b: Plan) -> bool:
    lists = [[mb.tolist() for rank in p.micro_batches for mb in rank] for p in (a, b)]
    return lists[0] == lists[1] and (a.tokens, a.costs, a.critical_path) == (
        b.tokens,
        b.costs,
        b.critical_path,
    )


@pytest.mark.timeout(180)
def test_compiled_plans_are_those_of_plain_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of these tests to run on a machine compiles, for half a minute."""
    monkeypatch.setattr(accelerate, "COMPILE_FROM", 1)
    for seed in range(120):
        case = _case(seed)
        plain = _interpreted(monkeypatch, lambda case=case: plan(**case))
        assert _same(plan(**case), plain), f"seed {seed}"


def test_a_bin_takes_more_pieces_than_it_has_room_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two ranks with equally many pieces one has all the load; half of it moves, and arrays
    grow.
    """
    monkeypatch.setattr(accelerate, "COMPILE_FROM", 1)
    cost = np.append(np.ones(40), np.full(40, 1e-3))
    zero, budgets = np.zeros(80, np.int64), np.ones(2, np.int64)

    def level() -> np.ndarray:
        bins, order = np.repeat([0, 1], 40), np.argsort(cost, kind="stable")
        enough = 1.001 * float(cost.sum()) / 2
        loop = accelerated(improve, cost.size)
        return loop(bins, order, cost, zero, zero, budgets, 1, enough, 2560, True, True)

    even = level()
    assert np.array_equal(even, _interpreted(monkeypatch, level))
    assert np.bincount(even).max() > 50


def test_array_primitives_are_those_of_lists() -> None:
    from trainer.batching.loops import array_primitives

    numba = pytest.importorskip("numba")
    replacements = array_primitives.REPLACEMENTS
    compiled = {old: numba.njit(new) for old, new in replacements.items()}
    rng = np.random.default_rng(0)
    for count in (0, 1, 2, 7, 64):
        values = rng.integers(0, 20, count).astype(float)
        for sort in (primitives.ascending, primitives.descending):
            assert compiled[sort](values).tolist() == sort(values.tolist())
        values.sort()
        for search in (bisect_left, bisect_right):
            for value in (-1.0, 3.0, 3.5, 19.0, 20.0):
                found = search(values.tolist(), value, 0, count)
                assert compiled[search](values, value, 0, count) == found
        for zeros in (primitives.floats, primitives.integers):
            assert compiled[zeros](count).tolist() == zeros(count)


def test_warming_up_leaves_nothing_to_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans of any kind find what they run on."""
    monkeypatch.setattr(accelerate, "COMPILE_FROM", 1)
    warm_up(256)
    loops = accelerate.compiled_loops()
    assert loops is not None
    ready = {loop: list(compiled.signatures) for loop, compiled in loops.items()}
    assert all(ready.values())
    for seed in range(40):
        plan(**_case(seed))
    assert {loop: list(compiled.signatures) for loop, compiled in loops.items()} == ready


def test_numba_is_left_alone_until_a_plan_is_large() -> None:
    code = (
        "import sys; from trainer.batching import plan, warm_up; warm_up(31); plan(range(1, 32), "
        "99, 2); "
        "assert 'numba' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_compiled_code_is_kept_where_nobody_else_writes(tmp_path: Path) -> None:
    code = "from trainer.batching.loops.accelerate import compiled_loops; assert compiled_loops()"
    env = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, env=env)
    (folder,) = tmp_path.iterdir()
    assert folder.stat().st_mode & 0o777 == 0o700


def test_code_of_another_user_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trainer.batching.loops import compiler

    monkeypatch.setattr(compiler.os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    with pytest.raises(RuntimeError, match="another user"):
        compiler.require_private(tmp_path)


def test_what_was_compiled_of_other_sources_is_deleted(tmp_path: Path) -> None:
    """Also when only a loop has changed that is part of others."""
    from trainer.batching.loops import compiler

    kept = tmp_path / "rows.fill_rows-1.py311.nbi"
    other = tmp_path / "somebody.fill_rows-1.py311.nbi"
    drop_outdated = compiler.drop_outdated.__wrapped__
    for mark, left in ((None, False), ("of other sources", False), ("of these", True)):
        kept.touch()
        other.touch()
        if mark == "of other sources":
            (tmp_path / "plimsoll-sources").write_text(mark)
        drop_outdated(tmp_path)
        assert (kept.exists(), other.exists()) == (left, True)
    expected = sorted(["plimsoll-sources", kept.name, other.name])
    assert sorted(p.name for p in tmp_path.iterdir()) == expected


@pytest.mark.parametrize(
    "error",
    [
        ModuleNotFoundError("numba"),
        RuntimeError("no locator available"),
        OSError(28, "No space left on device"),
    ],
)
def test_without_numba_or_a_cache_folder_plain_python_plans(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(name: str) -> None:
        raise error

    monkeypatch.setattr(accelerate, "import_module", fail)
    monkeypatch.setattr(accelerate, "compiled_loops", accelerate.compiled_loops.__wrapped__)
    assert accelerate.compiled_loops() is None
    assert plan(range(100, 200), 400, 4).efficiency > 0.9
