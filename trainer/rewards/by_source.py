"""The score of a response by the rule of its data source."""

from __future__ import annotations

from collections.abc import Mapping

from trainer.base.reward_rules import RuleName, rule_or_default
from trainer.rewards.maths import quick_maths, slow_maths
from trainer.rewards.rules.matching import exact_match, multiple_choice, search_em
from trainer.rewards.types import RewardRequest


def quick_score(request: RewardRequest, rules: Mapping[str, RuleName]) -> float | None:
    """1.0 or 0.0 by the rule of the request's data source (``reward.rules`` or the built-in one);
    None when math-verify has to compare, which takes a worker process.
    """
    rule = rule_or_default(request.data_source, rules)
    if rule == "maths":
        return quick_maths(request.solution_text, request.ground_truth)
    match = {
        "multiple_choice": multiple_choice,
        "exact_match": exact_match,
        "search_em": search_em,
    }[rule]
    return match(request.solution_text, request.ground_truth)


def slow_score(request: RewardRequest) -> float:
    """1.0 or 0.0 of a response that ``quick_score`` leaves to math-verify."""
    return slow_maths(request.solution_text, request.ground_truth)
