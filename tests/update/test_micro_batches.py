"""The gradient doesn't depend on how sequences are packed: budget, buckets, shared prompts, order,
ranks or ZeRO stage.
"""

from __future__ import annotations

from typing import Any, get_args

import pytest

from tests.parallel.ranks import distance, results
from trainer.config.schema.actor import LossMode

TOLERANCE = 1e-5
"""Largest relative difference in float32."""
UNBOUNDED = 10**6

COMMON: list[dict[str, Any]] = [
    {"zero": z, "budget": b} for z in range(4) for b in (512, 1024, UNBOUNDED)
] + [
    {"zero": 0, "budget": 512, "share": True},
    {"zero": 3, "budget": UNBOUNDED, "share": True},
    {"zero": 1, "budget": 512, "buckets": [64, 128]},
    {"zero": 2, "budget": 1024, "buckets": [96], "share": True},
    {"zero": 1, "budget": 512, "reverse": True},
    {"zero": 1, "micro": 4},
    {"zero": 2, "micro": 6},
]
LORA: list[dict[str, Any]] = [{"zero": z, "budget": 1024, "lora": 4} for z in range(4)]
TWO: list[dict[str, Any]] = [{"zero": 1, "budget": [512, 1024]}, {"zero": 2, "budget": [1024, 512]}]
LOSSES = (*get_args(LossMode), "value")
WHOLE: list[dict[str, Any]] = [{"zero": 0, "budget": UNBOUNDED, "loss": mode} for mode in LOSSES]
CUT: list[dict[str, Any]] = [
    {"zero": i % 4, "budget": 512, "share": i % 2 == 0, "loss": mode}
    for i, mode in enumerate(LOSSES)
]
VARIANTS = {1: [*COMMON, LORA[0], *WHOLE], 2: [*COMMON, *TWO, *LORA, *CUT]}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """The outcomes of all variants, by number of ranks."""
    return {n: results(VARIANTS[n], tmp_path_factory.mktemp(f"ranks_{n}"), n) for n in VARIANTS}


def test_gradients_and_losses_are_equal_for_every_plan(
    outcomes: dict[int, list[dict[str, Any]]],
) -> None:
    whole = outcomes[1][VARIANTS[1].index({"zero": 0, "budget": UNBOUNDED})]
    assert whole["counts"] == [1]
    measured = {
        f"{ranks} rank(s), {variant}": (
            distance(one["gradient"], whole["gradient"]),
            one["loss"],
            one["norm"],
        )
        for ranks, variants in VARIANTS.items()
        for variant, one in zip(variants, outcomes[ranks], strict=True)
        if variant not in (*LORA, *WHOLE, *CUT)
    }
    bad = {name: values for name, values in measured.items() if values[0] > TOLERANCE}
    assert not bad
    for name, (_, loss, norm) in measured.items():
        assert loss == pytest.approx(whole["loss"], rel=TOLERANCE), name
        assert norm == pytest.approx(whole["norm"], rel=TOLERANCE), name


@pytest.mark.parametrize("mode", LOSSES)
def test_losses_are_equal_for_every_plan(
    outcomes: dict[int, list[dict[str, Any]]], mode: str
) -> None:
    """Also of the two that choose tokens by their covariance over the whole step, and of the
    critic's.
    """
    whole = outcomes[1][VARIANTS[1].index(WHOLE[LOSSES.index(mode)])]
    cut = outcomes[2][VARIANTS[2].index(CUT[LOSSES.index(mode)])]
    assert whole["counts"] == [1] and sum(cut["counts"]) >= 4
    assert distance(cut["gradient"], whole["gradient"]) < TOLERANCE
    assert cut["loss"] == pytest.approx(whole["loss"], abs=1e-6)
    others = [one["loss"] for one in outcomes[1][-len(LOSSES) :]]
    assert len({round(loss, 6) for loss in others}) == len(LOSSES)


def test_adapter_gradients_are_equal_under_every_zero_stage_and_the_reference_is_the_base_model(
    outcomes: dict[int, list[dict[str, Any]]],
) -> None:
    alone = outcomes[1][VARIANTS[1].index(LORA[0])]
    whole = outcomes[1][0]
    assert alone["loss"] != pytest.approx(whole["loss"], rel=1e-4) and alone["gradient"].norm() > 0
    for variant in LORA:
        one = outcomes[2][VARIANTS[2].index(variant)]
        assert distance(one["gradient"], alone["gradient"]) < 10 * TOLERANCE, variant
        assert (one["loss"], one["norm"]) == pytest.approx(
            (alone["loss"], alone["norm"]), rel=TOLERANCE
        ), variant
        assert one["reference_difference"] < (TOLERANCE if variant["zero"] == 3 else 1e-12), variant


def test_small_budgets_make_more_micro_batches_within_the_budget(
    outcomes: dict[int, list[dict[str, Any]]],
) -> None:
    """Small budgets make many micro-batches, never over the budget; under ZeRO 2 and 3 all ranks
    have the same number.
    """
    for ranks, variants in VARIANTS.items():
        for variant, one in zip(variants, outcomes[ranks], strict=True):
            budget = variant.get("budget")
            budgets = budget if isinstance(budget, list) else [budget] * ranks
            if budget is not None:
                assert all(
                    t <= b for b, rank in zip(budgets, one["tokens"], strict=True) for t in rank
                ), variant
            if variant["zero"] >= 2:
                assert len(set(one["counts"])) == 1, variant
            if budget == 512:
                assert sum(one["counts"]) >= 4, variant


def test_shared_prompts_hold_fewer_tokens(outcomes: dict[int, list[dict[str, Any]]]) -> None:
    plain = outcomes[1][VARIANTS[1].index({"zero": 3, "budget": UNBOUNDED})]
    shared = outcomes[1][VARIANTS[1].index({"zero": 3, "budget": UNBOUNDED, "share": True})]
    assert sum(shared["tokens"][0]) < sum(plain["tokens"][0])
