"""Hints on runs that don't learn: when each comes, when it doesn't, and the keys it names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.tracking.watermarks import watermarks
from trainer.tracking.health import Health
from trainer.tracking.learning_hints import (
    HINTS,
    LearningSettings,
    entropy_hint,
)

SIZE = 10
RAMP = [i / (SIZE - 1) for i in range(SIZE)]
HEALTHY = {
    "timing/step": 1.0,
    "critic/score/max": 1.0,
    "critic/score/min": 0.0,
    "critic/zero_spread_groups": 0.5,
    "actor/grad_norm": 0.3,
    "response_length/clip_ratio": 0.1,
    "response_length/mean": 50.0,
    "actor/entropy": 1.0,
    "actor/kl_loss": 0.05,
}
SAME = [1.0] * SIZE


def settings(**changed: Any) -> LearningSettings:
    return LearningSettings(window=SIZE, response_length=100, **changed)


def window(**changed: list[float] | None) -> list[dict[str, float]]:
    """Healthy steps with other values of some metrics (``__`` for ``/``); None: it is missing."""
    steps = [dict(HEALTHY) for _ in range(SIZE)]
    for name, values in changed.items():
        for i, step in enumerate(steps):
            step.pop(name.replace("__", "/"), None)
            if values is not None:
                step[name.replace("__", "/")] = values[i]
    return steps


def scaled(low: float, high: float) -> list[float]:
    return [low + (high - low) * share for share in RAMP]


FIRES = [
    ("constant scores", {"critic__score__min": SAME}, {}, "custom_reward_function.path"),
    ("zero spread", {"critic__zero_spread_groups": [0.8] * SIZE}, {}, "filter_groups.enable=true"),
    ("zero gradient", {"actor__grad_norm": [0.0] * SIZE}, {}, "actor_rollout_ref.rollout.n"),
    (
        "zero gradient",
        {"actor__grad_norm": None, "train__grad_norm": [0.0] * SIZE, "critic__score__max": None},
        {},
        "data.train_files",
    ),
    ("truncation", {"response_length__clip_ratio": [0.6] * SIZE}, {}, "data.max_response_length"),
    ("truncation", {"response_length__clip_ratio": [0.6] * SIZE}, {}, "overlong_buffer.enable"),
    ("length", {"response_length__mean": scaled(40, 80)}, {}, "data.max_response_length"),
    ("KL", {"actor__kl_loss": scaled(0.01, 0.5)}, {}, "actor_rollout_ref.actor.kl_loss_coef"),
    (
        "KL",
        {"actor__reward_kl_penalty": scaled(0.01, 0.5)},
        {"kl_in_reward": True},
        "algorithm.kl_ctrl.kl_coef",
    ),
    (
        "KL",
        {"actor__reward_kl_penalty": [0.05] * SIZE},
        {"kl_in_reward": True, "kl_target": 0.02},
        "algorithm.kl_ctrl.horizon",
    ),
]
SILENT = [
    ("constant scores", {}, {}),
    ("constant scores", {"critic__score__min": [*SAME[1:], 0.0]}, {}),
    ("constant scores", {"critic__score__max": None, "critic__score__min": None}, {}),
    ("zero spread", {}, {}),
    ("zero spread", {"critic__zero_spread_groups": SAME}, {"compares_groups": False}),
    ("zero spread", {"critic__zero_spread_groups": SAME}, {"filters_groups": True}),
    ("zero spread", {"critic__zero_spread_groups": SAME, "critic__score__min": SAME}, {}),
    ("zero gradient", {"actor__grad_norm": [*[0.0] * (SIZE - 1), 1e-9]}, {}),
    ("zero gradient", {"actor__grad_norm": [float("nan")] * SIZE}, {}),
    ("zero gradient", {"actor__grad_norm": [0.0] * SIZE, "critic__score__min": SAME}, {}),
    ("truncation", {"response_length__clip_ratio": [0.4] * SIZE}, {}),
    ("length", {"response_length__mean": scaled(80, 40)}, {}),
    ("length", {"response_length__mean": scaled(20, 24)}, {}),
    ("length", {"response_length__mean": [95.0] * SIZE}, {}),
    ("KL", {"actor__kl_loss": scaled(0.001, 0.05)}, {}),
    ("KL", {"actor__kl_loss": [0.5] * SIZE}, {}),
    (
        "KL",
        {"actor__reward_kl_penalty": [0.03] * SIZE},
        {"kl_in_reward": True, "kl_target": 0.02},
    ),
    ("KL", {"actor__kl_loss": None}, {}),
]


@pytest.mark.parametrize(("kind", "changed", "config", "key"), FIRES)
def test_a_lasting_sign_gives_a_hint_with_the_key_to_change(
    kind: str, changed: Any, config: Any, key: str
) -> None:
    assert key in (HINTS[kind](window(**changed), settings(**config)) or "")


@pytest.mark.parametrize(("kind", "changed", "config"), SILENT)
def test_a_healthy_run_gives_none(kind: str, changed: Any, config: Any) -> None:
    assert HINTS[kind](window(**changed), settings(**config)) is None


def test_entropy_is_compared_with_the_first_steps() -> None:
    first = window()
    assert "clip_ratio_high" in (entropy_hint(window(actor__entropy=[0.19] * SIZE), first) or "")
    assert entropy_hint(window(actor__entropy=[0.21] * SIZE), first) is None
    assert entropy_hint(window(actor__entropy=None), first) is None


def steps_until(check: Callable[[dict[str, Any]], list[str]], metrics: dict[str, Any]) -> list[int]:
    """The steps at which a hint comes."""
    return [step for step in range(1, 4 * SIZE) for _ in check(metrics)]


def test_each_comes_once_after_its_window() -> None:
    cut = HEALTHY | {"response_length/clip_ratio": 1.0}
    health = Health(watermarks(), learning=settings())
    assert steps_until(health.check, cut) == [SIZE]
    collapse = HEALTHY | {"actor/entropy": 0.1}
    assert steps_until(health.check, collapse) == [9]  # the mean is 0.19
    off = Health(watermarks(), learning=LearningSettings(window=0, response_length=100))
    assert steps_until(off.check, cut) == []
