"""Budgets: recommended, measured, lowered; and the rest of a step after an out-of-memory error."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.base.errors import UserError
from trainer.batching import (
    adaptive_clip,
    after_out_of_memory,
    assign_buckets,
    bucket_names,
    bucket_speeds,
    lowered_budget,
    measured_budget,
    plan,
    recommended_budget,
)


def test_recommended_budget_is_the_published_example() -> None:
    assert recommended_budget(210, 380, 24) == 16384
    assert recommended_budget(512, 512, 16) == 16384  # exactly a power of two stays
    assert recommended_budget(150, 250, concurrent=4) == 2048


def test_measured_budget_follows_free_memory() -> None:
    probes = [(1024, 10_000_000 + 1024 * 9000), (4096, 10_000_000 + 4096 * 9000)]
    small = measured_budget(probes, 100_000_000, longest=512)
    large = measured_budget(probes, 400_000_000, longest=512)
    assert small == (90_000_000 - 10_000_000) // 9000 // 64 * 64
    assert large > 4 * small * 0.9 and large % 64 == 0


def test_measured_budget_mistrusts_probes_that_barely_grow() -> None:
    """Two probes within the allocator's noise must not promise an endless budget."""
    assert (
        measured_budget([(1000, 9_990_000), (2000, 10_000_000)], 100_000_000, longest=10) <= 40_000
    )


def test_adaptive_clip_is_the_published_example() -> None:
    assert adaptive_clip(1.0, 4, 8) == 0.5
    assert adaptive_clip(1.0, 8, 8) == adaptive_clip(1.0, 800, 8) == 1.0


def test_bucket_edges_belong_to_the_lower_bucket() -> None:
    assert assign_buckets([1, 64, 65, 256, 257, 9999], [64, 256]).tolist() == [0, 0, 1, 1, 2, 2]
    assert bucket_names([64, 256]) == ["1-64", "65-256", "257+"]


def test_bucket_speeds() -> None:
    speeds = bucket_speeds([0, 0, 2], [100, 300, 50], [1.0, 1.0, 0.5], 3)
    assert speeds[0] == 200.0 and np.isnan(speeds[1]) and speeds[2] == 100.0


def test_lowered_budget() -> None:
    assert lowered_budget(16384, 2000) == 12288
    assert lowered_budget(16384, 14000) == 14000
    with pytest.raises(
        UserError, match=r"8000 tokens.*no budget helps.*max_response_length.*offload"
    ):
        lowered_budget(8000, 8000)


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(1, 900), min_size=6, max_size=40),
    st.integers(1, 4),
    st.sampled_from(["micro", "step"]),
    st.booleans(),
    st.data(),
)
def test_recovery_at_any_micro_batch_of_any_rank(
    responses: list[int], ranks: int, sync: str, share: bool, data: st.DataObject
) -> None:
    groups = [i // 3 for i in range(len(responses))]
    prompts = [40 + g for g in groups]
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
    before = plan(
        lengths,
        1000,
        ranks,
        sync,
        groups=groups,
        prompt_lengths=prompts,
        share_prompts=share,  # type: ignore[arg-type]
    )
    loaded = [
        (r, k) for r, mbs in enumerate(before.micro_batches) for k, mb in enumerate(mbs) if mb.size
    ]
    rank, k = data.draw(st.sampled_from(loaded))
    failed = before.micro_batches[rank][k]
    if failed.size == 1:
        with pytest.raises(UserError, match="no budget helps"):
            after_out_of_memory(before, k, [rank])
        return
    after = after_out_of_memory(before, k, [rank])
    # what ran is kept, what ran out of memory is smaller, everything is still computed exactly once
    for r in range(ranks):
        assert [m.tolist() for m in after.micro_batches[r][:k]] == [
            m.tolist() for m in before.micro_batches[r][:k]
        ]
    assert after.tokens[rank][k] < before.tokens[rank][k]
    flat = sorted(i for mbs in after.micro_batches for mb in mbs for i in mb.tolist())
    assert flat == list(range(len(lengths)))
    if sync == "micro":
        assert len(set(after.num_micro_batches)) == 1
    else:
        assert all(
            after.num_micro_batches[r] == before.num_micro_batches[r]
            for r in range(ranks)
            if r != rank
        )
    assert after.budgets[rank] <= 1000 and max(after.tokens[rank][k:]) <= after.budgets[rank]
    assert all(after.budgets[r] == 1000 for r in range(ranks) if r != rank)


def test_recovery_at_the_same_micro_batch_of_two_ranks() -> None:
    before = plan([100] * 40, 1000, 4)
    after = after_out_of_memory(before, 0, [1, 3])
    assert after.budgets.tolist() == [1000, 704, 1000, 704]
    assert len(set(after.num_micro_batches)) == 1
