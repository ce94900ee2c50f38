"""Hints that a run doesn't learn, or soon won't: from the metrics of its newest steps.

Each hint is a pure function of a window, the metrics of some steps in a row. It gives the likely
cause and the key to change, or None.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from trainer.config.schema import Config
from trainer.config.schema.algorithm import BY_GROUP

Window = Sequence[Mapping[str, Any]]
ZERO_SPREAD_SHARE = 0.8
TRUNCATED_SHARE = 0.5
ENTROPY_LEFT = 0.2
"""Share of the first window's entropy."""
KL_NATS = 0.1
"""A KL per token below this is no matter, however it grows."""
KL_GROWTH = 2.0
LENGTH_GROWTH = 1.05
_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"


@dataclass(frozen=True, kw_only=True)
class LearningSettings:
    """What the hints have to know of the config."""

    window: int
    """Steps that a sign has to last. 0: no hints."""
    response_length: int
    """Most tokens of a response."""
    compares_groups: bool = True
    """The estimator compares the responses to one prompt."""
    filters_groups: bool = False
    """Prompts whose responses are all alike are left out already."""
    overlong_penalty: bool = False
    kl_target: float | None = None
    """Of the adaptive controller, nats per token."""
    kl_in_reward: bool = False

    @classmethod
    def from_config(cls, config: Config) -> LearningSettings:
        """The settings of a run."""
        algorithm = config.algorithm
        adaptive = algorithm.use_kl_in_reward and algorithm.kl_ctrl.type == "adaptive"
        return cls(
            window=config.trainer.watermarks.learning_steps,
            response_length=config.data.max_response_length,
            compares_groups=algorithm.adv_estimator in BY_GROUP,
            filters_groups=algorithm.filter_groups.enable,
            overlong_penalty=config.reward_model.overlong_buffer.enable,
            kl_target=algorithm.kl_ctrl.target_kl if adaptive else None,
            kl_in_reward=algorithm.use_kl_in_reward,
        )


def constant_scores_hint(window: Window, settings: LearningSettings) -> str | None:
    """A hint when all responses have had one and the same reward."""
    rewards = set(_values(window, "critic/score/max") + _values(window, "critic/score/min"))
    if len(rewards) != 1 or not _is_in_all(window, "critic/score/max"):
        return None
    return (
        f"every response of the last {len(window)} steps has reward {rewards.pop():g} "
        "(critic/score), so there is nothing to learn from: the reward function doesn't tell "
        "responses apart, or the task is far too hard or too easy. Read some with "
        "trainer.rollout_data_dir=FOLDER; change custom_reward_function.path, data.train_files, "
        "or data.max_response_length if answers are cut off."
    )


def zero_spread_hint(window: Window, settings: LearningSettings) -> str | None:
    """A hint when most prompts have responses with one reward, though not all have the same."""
    name = "critic/zero_spread_groups"
    if not settings.compares_groups or settings.filters_groups or not _is_in_all(window, name):
        return None
    share = fmean(_values(window, name))
    if not share >= ZERO_SPREAD_SHARE or constant_scores_hint(window, settings) is not None:
        return None
    return (
        f"the responses to {share:.0%} of the prompts all have the same reward ({name}, last "
        f"{len(window)} steps): such prompts teach nothing, being too easy or too hard. Set "
        f"algorithm.filter_groups.enable=true, raise {_ROLLOUT}.n, or change data.train_files."
    )


def zero_gradient_hint(window: Window, settings: LearningSettings) -> str | None:
    """A hint when the gradient is 0 though rewards differ."""
    name = _first_name(window, "actor/grad_norm", "train/grad_norm")
    if name is None or any(_values(window, name)):
        return None
    if constant_scores_hint(window, settings) is not None:
        return None
    if name == "train/grad_norm":
        advice = (
            "no token is trained on: look at the answers in data.train_files and at "
            "data.max_response_length"
        )
    else:
        advice = (
            f"all advantages are 0 or no token is trained on. Raise {_ROLLOUT}.n or "
            f"{_ROLLOUT}.temperature, or set algorithm.filter_groups.enable=true"
        )
    return (
        f"{name} was 0 in the last {len(window)} steps, so the weights stay as they are: {advice}."
    )


def truncation_hint(window: Window, settings: LearningSettings) -> str | None:
    """A hint when many responses are cut off."""
    name = "response_length/clip_ratio"
    if not _is_in_all(window, name):
        return None
    share = fmean(_values(window, name))
    if not share >= TRUNCATED_SHARE:
        return None
    return (
        f"{share:.0%} of the responses are cut off at {settings.response_length} tokens ({name}, "
        f"last {len(window)} steps) and most likely judged without their answer. Raise "
        f"data.max_response_length{_penalty_advice(settings)}."
    )


def length_hint(window: Window, settings: LearningSettings) -> str | None:
    """A hint when responses grow so fast that the mean reaches the limit within a window."""
    name = "response_length/mean"
    if not _is_in_all(window, name) or truncation_hint(window, settings) is not None:
        return None
    early, late = _halves(_values(window, name))
    limit = settings.response_length
    if not late >= LENGTH_GROWTH * early or not late + 2.0 * (late - early) >= limit:
        return None
    return (
        f"responses grow towards their limit: {early:.0f}, then {late:.0f} of {limit} tokens "
        f"({name}, halves of the last {len(window)} steps). Longer ones will be cut off. Raise "
        f"data.max_response_length{_penalty_advice(settings)}."
    )


def entropy_hint(window: Window, first: Window) -> str | None:
    """A hint when the entropy has fallen to a small part of that of the ``first`` window."""
    name = "actor/entropy"
    if not _is_in_all(window, name) or not _is_in_all(first, name):
        return None
    before = fmean(_values(first, name))
    now = fmean(_values(window, name))
    if not now < ENTROPY_LEFT * before:
        return None
    return (
        f"the policy's entropy has collapsed from {before:.3g} to {now:.3g} nats a token ({name}, "
        f"{len(window)} steps each): its responses become alike and it stops exploring. Lower "
        f"{_ACTOR}.optim.lr, raise {_ACTOR}.clip_ratio_high (0.28 in DAPO) or "
        f"{_ACTOR}.entropy_coeff, or go back to an earlier checkpoint (trainer.resume_mode=path)."
    )


def kl_hint(window: Window, settings: LearningSettings) -> str | None:
    """A hint when the KL to the reference runs off: it is above twice the adaptive controller's
    target, or grows to twice as much within the window.
    """
    name = _first_name(window, "actor/reward_kl_penalty", "actor/kl_loss")
    if name is None:
        return None
    early, late = _halves(_values(window, name))
    target = settings.kl_target
    if name == "actor/reward_kl_penalty" and target is not None:
        if not min(early, late) > KL_GROWTH * target:
            return None
        limit = f"more than twice algorithm.kl_ctrl.target_kl={target:g}"
        advice = "Lower algorithm.kl_ctrl.horizon so that the coefficient follows faster"
    else:
        if not late > KL_NATS or not late >= KL_GROWTH * early:
            return None
        limit = f"up from {early:.3g}"
        advice = f"Raise {_ACTOR}.kl_loss_coef"
        if settings.kl_in_reward:
            advice = "Raise algorithm.kl_ctrl.kl_coef"
    return (
        f"the policy runs off from its reference: KL {late:.3g} nats a token, {limit} ({name}, "
        f"last {len(window)} steps). {advice}, or lower {_ACTOR}.optim.lr."
    )


WindowHint = Callable[[Window, LearningSettings], str | None]
HINTS: Mapping[str, WindowHint] = {
    "constant scores": constant_scores_hint,
    "zero spread": zero_spread_hint,
    "zero gradient": zero_gradient_hint,
    "truncation": truncation_hint,
    "length": length_hint,
    "KL": kl_hint,
}


class LearningHints:
    """Keeps the newest steps' metrics and gives the hints that they call for."""

    def __init__(self, settings: LearningSettings) -> None:
        self._settings = settings
        self._first: list[Mapping[str, Any]] = []
        self._window: list[Mapping[str, Any]] = []

    def check(self, metrics: Mapping[str, Any]) -> dict[str, str | None]:
        """Each hint by its kind after a further step, None where there is no reason for it."""
        size = self._settings.window
        if size == 0:
            return {}
        self._window = [*self._window, metrics][-size:]
        if len(self._first) < size:
            self._first.append(metrics)
            if len(self._first) < size:
                return {}
        hints = {kind: hint(self._window, self._settings) for kind, hint in HINTS.items()}
        return {**hints, "entropy": entropy_hint(self._window, self._first)}


def _penalty_advice(settings: LearningSettings) -> str:
    if settings.overlong_penalty:
        return ""
    return ", or set reward_model.overlong_buffer.enable=true"


def _values(window: Window, name: str) -> list[float]:
    return [float(metrics[name]) for metrics in window if name in metrics]


def _is_in_all(window: Window, name: str) -> bool:
    """Whether each step has a finite number of that ``name``."""
    return len(window) > 0 and all(
        isinstance(metrics.get(name), int | float) and math.isfinite(metrics[name])
        for metrics in window
    )


def _first_name(window: Window, *names: str) -> str | None:
    """The first of ``names`` that each step has."""
    return next((name for name in names if _is_in_all(window, name)), None)


def _halves(values: Sequence[float]) -> tuple[float, float]:
    """The means of the first and of the second half."""
    middle = max(len(values) // 2, 1)
    return fmean(values[:middle]), fmean(values[-middle:])
