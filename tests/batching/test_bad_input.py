"""Wrong input ends in one message that says what, where and what to type instead."""

from __future__ import annotations

from typing import Any

import pytest

from trainer.base.errors import UserError
from trainer.batching import (
    adaptive_clip,
    assign_buckets,
    measured_budget,
    plan,
    recommended_budget,
    static_plan,
)

CASES: list[tuple[dict[str, Any], str]] = [
    (
        {"lengths": [5, 900, 7], "budget": 512},
        r"sequence 1 has 900 tokens.*budget of 512 .*"
        r"raise .*_max_token_len_per_gpu to 900 or more.*max_prompt",
    ),
    (
        {"lengths": [5, 900, 901], "budget": [100, 899]},
        r"sequence 2 has 901 tokens.*\(2 sequences are too long\)",
    ),
    ({"lengths": [5, 0, 7]}, r"sequence 1 has length 0"),
    ({"lengths": [5, 3, -7]}, r"sequence 2 has length -7"),
    ({"lengths": [5, 3.5]}, r"entry 1 is 3.5, expected a whole number"),
    ({"lengths": [[5], [3]]}, r"expected a flat list"),
    ({"lengths": ["five"]}, r"expected whole numbers"),
    (
        {"budget": [512, 512, 512]},
        r"ppo_max_token_len_per_gpu lists 3 budgets for 2 ranks; give one number, or 2",
    ),
    ({"budget": [512, 0]}, r"rank 1 has a budget of 0 tokens"),
    ({"budget": -1}, r"rank 0 has a budget of -1 tokens"),
    ({"ranks": 0}, r"at least 1 rank, got 0"),
    ({"sync": "sometimes"}, r"write 'micro' .* or 'step'"),
    (
        {"buckets": [64, 256, 256], "bucket_by": "total"},
        r"256 follows 256, but boundaries must rise; try \[64, 256\]",
    ),
    ({"buckets": [256, 64], "bucket_by": "total"}, r"64 follows 256.*try \[64, 256\]"),
    ({"buckets": [0, 64], "bucket_by": "total"}, r"the first boundary must be at least 1"),
    ({"buckets": [64]}, r"by prompt need prompt_lengths"),
    ({"buckets": [64], "bucket_by": "response"}, r"write 'prompt' or 'total'"),
    ({"prompt_lengths": [1]}, r"1 prompt lengths for 3 sequences"),
    ({"prompt_lengths": [1, 99, 1]}, r"sequence 1: prompt length 99 must be 0 .. 20"),
    ({"groups": [1]}, r"1 group numbers for 3 sequences"),
    ({"keep_groups": True}, r"need groups"),
    ({"share_prompts": True, "groups": [0, 0, 1]}, r"needs prompt_lengths"),
    (
        {"share_prompts": True, "groups": [0, 0, 1], "prompt_lengths": [3, 4, 5]},
        r"sequences \[0, 1\] are one group but their prompts have 3 to 4 tokens.*"
        r"share_prompt=False",
    ),
]


@pytest.mark.parametrize(("change", "message"), CASES)
def test_message(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        plan(**{"lengths": [10, 20, 30], "budget": 512, "ranks": 2, **change})


def test_more_ranks_than_sequences_runs_fillers() -> None:
    for sync in ("micro", "step"):
        made = plan([10, 20, 30], 512, 5, sync)  # type: ignore[arg-type]
        assert made.num_micro_batches == [1] * 5
        assert sum(mb.size == 0 for rank in made.micro_batches for mb in rank) == 2


def test_nothing_to_plan_is_one_filler_per_rank() -> None:
    made = plan([], 512, 3)
    assert [[mb.size for mb in rank] for rank in made.micro_batches] == [[0]] * 3
    assert made.metrics()["batch/fill_ratio"] == 0.0


def test_other_messages() -> None:
    with pytest.raises(UserError, match="boundaries must rise"):
        assign_buckets([1], [4, 2])
    with pytest.raises(UserError, match="all must be > 0"):
        recommended_budget(0, 0, 8)
    with pytest.raises(UserError, match=r"auto.*holds 512 tokens.*sequences have up to 4096"):
        measured_budget([(1000, 1_000_000), (2000, 2_000_000)], 600_000, longest=4096)
    with pytest.raises(UserError, match="must be positive"):
        adaptive_clip(0.0, 4, 8)
    with pytest.raises(UserError, match="min_batch_size=0"):
        adaptive_clip(1.0, 4, 0)
    with pytest.raises(UserError, match="ppo_micro_batch_size_per_gpu=0"):
        static_plan([1, 2], 0, 1)
