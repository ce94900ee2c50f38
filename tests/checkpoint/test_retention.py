"""Which checkpoints stay."""

from __future__ import annotations

import math
from typing import Any, Literal

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.store.retention import steps_to_keep

STEPS = st.lists(st.integers(1, 200), unique=True, min_size=1, max_size=20)
VALUES = st.none() | st.floats(-5, 5) | st.just(math.nan)


@given(
    steps=STEPS,
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 50),
    keep_best=st.integers(0, 4),
    best_mode=st.sampled_from(["max", "min"]),
    data=st.data(),
)
def test_steps_to_keep(
    steps: list[int],
    keep_last: int,
    keep_every: int | None,
    keep_best: int,
    best_mode: Literal["max", "min"],
    data: st.DataObject,
) -> None:
    metrics = {s: data.draw(VALUES) for s in steps}
    stay = steps_to_keep(
        steps,
        keep_last=keep_last,
        keep_every=keep_every,
        keep_best=keep_best,
        metrics=metrics,
        best_mode=best_mode,
    )
    assert stay <= set(steps) and max(steps) in stay
    assert set(sorted(steps)[-keep_last:]) <= stay
    assert not keep_every or {s for s in steps if s % keep_every == 0} <= stay
    known = {s: m for s, m in metrics.items() if m is not None and not math.isnan(m)}
    bests = stay & set(known)
    assert len(bests) >= min(keep_best, len(known))
    if keep_best and known:
        top = (max if best_mode == "max" else min)(known.values())
        assert any(known[s] == top for s in bests)
        # Nothing that went was better than the worst of the best that stayed.
        ranked = sorted(known, key=lambda s: (-known[s] if best_mode == "max" else known[s], s))
        assert set(ranked[:keep_best]) <= stay
    allowed = keep_last + keep_best + (sum(s % keep_every == 0 for s in steps) if keep_every else 0)
    assert len(stay) <= allowed
    assert (
        steps_to_keep(
            sorted(stay),
            keep_last=keep_last,
            keep_every=keep_every,
            keep_best=keep_best,
            metrics=metrics,
            best_mode=best_mode,
        )
        == stay
    )


@given(
    steps=STEPS,
    keep_last=st.integers(1, 5),
    keep_every=st.none() | st.integers(1, 50),
    keep_best=st.integers(0, 4),
    data=st.data(),
)
def test_a_checkpoint_of_skipped_steps_displaces_no_good_one(
    steps: list[int], keep_last: int, keep_every: int | None, keep_best: int, data: st.DataObject
) -> None:
    unhealthy = data.draw(st.sets(st.sampled_from(steps)))
    healthy = [step for step in steps if step not in unhealthy]
    options: dict[str, Any] = {
        "keep_last": keep_last,
        "keep_every": keep_every,
        "keep_best": keep_best,
        "metrics": {step: data.draw(VALUES) for step in steps},
    }
    stay = steps_to_keep(steps, unhealthy=unhealthy, **options)
    assert stay == {max(steps)} | (steps_to_keep(healthy, **options) if healthy else set())


def test_retention_after_every_save_ends_with_the_best_of_all() -> None:
    """Step by step, as the committer calls it: the best is never dropped on the way."""
    values = [3.0, 1.0, math.nan, 5.0, 2.0, 5.0, 4.0, 0.0]
    have: set[int] = set()
    for step in range(1, len(values) + 1):
        have = steps_to_keep(
            sorted(have | {step}),
            keep_last=1,
            keep_best=2,
            metrics=dict(enumerate(values, 1)),
            best_mode="max",
        )
    assert have == {4, 6, 8}
