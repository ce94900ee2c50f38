"""The cost model against hand counts, and its calibration against times whose law is known."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

from trainer.base.model_shape import ModelShape
from trainer.batching import Calibrator, CostModel, calibrate, plan

SMALL = ModelShape(hidden=8, layers=2, heads=4, kv_heads=2, ffn=16, vocab=32)


def test_dense_flops_by_hand() -> None:
    per_layer = 8 * (8 + 2 * 4) + 8 * 8 + 3 * 8 * 16
    assert SMALL.active_params == 2 * per_layer + 8 * 32
    assert SMALL.params == 2 * per_layer + 2 * 8 * 32
    forward = CostModel.from_shape(SMALL, training=False)
    assert forward.linear == 2 * SMALL.active_params
    assert forward.quadratic == 2 * 2 * 8  # causal half of scores and values, 2 layers
    assert CostModel.from_shape(SMALL).linear == 3 * forward.linear
    assert CostModel.from_shape(SMALL, frozen=True).linear == 2 * forward.linear
    assert CostModel.from_shape(SMALL, recompute=True).quadratic == 4 * forward.quadratic


def test_qwen_7b_has_its_known_size() -> None:
    shape = ModelShape(hidden=3584, layers=28, heads=28, kv_heads=4, ffn=18944, vocab=152064)
    assert shape.params == pytest.approx(7.61e9, rel=0.01)


def test_mixture_of_experts_counts_visited_experts_only() -> None:
    """Qwen3-30B-A3B: 30.5 billion weights, 3.3 billion of them active."""
    shape = ModelShape(
        hidden=2048,
        layers=48,
        heads=32,
        kv_heads=4,
        head_dim=128,
        ffn=6144,
        vocab=151936,
        experts=128,
        experts_per_token=8,
        moe_ffn=768,
    )
    assert shape.params == pytest.approx(30.5e9, rel=0.01)
    assert shape.active_params == pytest.approx(3.3e9 - 2048 * 151936, rel=0.1)


def test_a_response_behind_a_shared_prompt_costs_the_rest_of_the_square() -> None:
    cost = CostModel(1.0, 1.0)
    lengths, prompts = np.array([7]), np.array([3])
    assert cost.responses(lengths, prompts)[0] + cost(prompts)[0] == cost(lengths)[0]


def test_calibration_finds_the_law_through_noise_and_stalls() -> None:
    rng = np.random.default_rng(0)
    law = CostModel(1e-4, 2e-8, 5e-3)
    calibrator = Calibrator()
    for _ in range(400):
        tokens = int(rng.integers(500, 16000))
        squares = float(tokens * rng.integers(200, tokens))
        seconds = law.linear * tokens + law.quadratic * squares + law.overhead
        calibrator.add(
            tokens,
            squares,
            seconds * (1 + 0.02 * rng.standard_normal()) * (4 if rng.random() < 0.1 else 1),
        )
    calibrator.add(0, 0, 0.5)  # a filler says nothing
    assert len(calibrator) == 400
    found = calibrator.fit()
    assert found is not None and found.samples == 400
    assert found.cost.linear == pytest.approx(law.linear, rel=0.1)
    assert found.cost.quadratic == pytest.approx(law.quadratic, rel=0.1)
    assert found.error < 0.03
    metrics = found.metrics(CostModel(2.0, 1e-3))
    assert metrics["cost/break_even_tokens_predicted"] == 2000.0
    assert metrics["cost/break_even_tokens_measured"] == pytest.approx(5000, rel=0.15)


def test_calibration_never_turns_negative_and_waits_for_data() -> None:
    assert calibrate([100, 100], [1, 1], [1, 1]) is None
    assert calibrate([100, 100, 100], [1, 1, 1], [1, 1, 1]) is None
    found = calibrate(
        [100, 200, 300, 400], [1e4, 4e4, 9e4, 16e4], [2.0, 3.0, 3.5, 3.8]
    )  # falling slope
    assert found is not None
    assert min(found.cost.linear, found.cost.quadratic, found.cost.overhead) >= 0


def test_calibration_claims_only_what_the_sizes_can_tell() -> None:
    rng = np.random.default_rng(3)
    tokens = rng.integers(1000, 1025, 400)  # full micro-batches
    alike = calibrate(tokens, 30.0 * tokens, 5e-5 * tokens * rng.normal(1.0, 0.05, 400))
    assert alike is not None
    assert alike.cost.quadratic == 0
    assert alike.cost.overhead == 0
    assert alike.cost.linear == pytest.approx(5e-5, rel=0.02)
    tokens = rng.integers(
        20, 2000, 400
    )  # sequences of one length: their squares grow with their number
    one_length = calibrate(
        tokens, 30.0 * tokens, (1e-4 * tokens + 0.02) * rng.normal(1.0, 0.05, 400)
    )
    assert one_length is not None
    assert one_length.cost.quadratic == 0
    assert one_length.cost.overhead == pytest.approx(0.02, rel=0.1)
    flat = calibrate(tokens, tokens**2, 0.02 * rng.normal(1.0, 0.05, 400))
    assert flat is not None
    assert (flat.cost.linear, flat.cost.quadratic) == (0, 0)


def test_squares_of_a_plan_count_attention_once_per_shared_prompt() -> None:
    made = plan([5, 6], 100, 1, groups=[0, 0], prompt_lengths=[3, 3], share_prompts=True)
    assert made.squares() == [[pytest.approx(9 + (25 - 9) + (36 - 9))]]
    assert made.tokens == [[3 + 2 + 3]]


def test_planner_needs_no_torch() -> None:
    code = "import sys, trainer.batching; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
