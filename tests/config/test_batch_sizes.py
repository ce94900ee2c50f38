"""The algebra of batch sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainer.config.checks.batch_sizes import DerivedSizes, Sizes, derive, violations

WORKED = Sizes(
    world=8, train_batch_size=512, ppo_mini_batch_size=128, micro_batch_size=8, n=16, tp=2, pp=2
)


def test_worked_example():
    derived = derive(WORKED)
    assert derived == DerivedSizes(
        dp=2, samples=8192, mini_per_rank=1024, optimizer_steps=4, accumulation=128
    )


def test_experts_add_no_gpus():
    assert derive(replace(WORKED, ep=4, experts=64)).dp == 2


def test_everything_that_does_not_divide_is_reported_at_once():
    bad = Sizes(
        world=9,
        train_batch_size=10,
        ppo_mini_batch_size=4,
        n=1,
        tp=3,
        pp=5,
        cp=2,
        ep=7,
        heads=32,
        layers=28,
        experts=64,
    )
    messages = "\n".join(violations(bad))
    for part in (
        "nearest valid: train_batch_size=8 or 12, or ppo_mini_batch_size=2 or 5",
        "tp=3 does not divide the model's 32 query heads; nearest valid: tp=2 or 4",
        "pp=5 does not divide the model's 28 layers; nearest valid: pp=4 or 7",
        "ep=7 does not divide the model's 64 experts; nearest valid: ep=4 or 8",
        "world=9 is not a multiple of ep * pp = 7 * 5 = 35; nearest valid: world=35",
        "world=9 is not a multiple of tp * pp * cp = 3 * 5 * 2 = 30 (dp = 0.30); nearest valid: "
        "world=30",
    ):
        assert part in messages
    with pytest.raises(ValueError, match="nearest valid"):
        derive(bad)


def test_sequence_parallel_needs_heads_that_divide():
    assert (
        "sp=3 does not divide the model's 32 query heads"
        in violations(replace(WORKED, tp=1, pp=1, cp=3, heads=32))[0]
    )


def test_micro_batch_that_does_not_divide_names_the_nearest():
    assert (
        "ppo_micro_batch_size_per_gpu=4 or 8" in violations(replace(WORKED, micro_batch_size=6))[0]
    )


def test_least_accumulation_is_tokens_over_budget():
    assert derive(WORKED).least_accumulation(590, 16384) == 37


random_sizes = st.builds(
    Sizes,
    world=st.integers(1, 64),
    train_batch_size=st.integers(1, 600),
    ppo_mini_batch_size=st.integers(1, 600),
    micro_batch_size=st.none() | st.integers(1, 64),
    n=st.integers(1, 16),
    ppo_epochs=st.integers(1, 3),
    tp=st.integers(1, 4),
    pp=st.integers(1, 4),
    cp=st.integers(1, 4),
)


@given(random_sizes)
def test_derived_sizes_account_for_every_sequence(sizes: Sizes):
    if violations(sizes):
        return
    derived = derive(sizes)
    shards = sizes.tp * sizes.pp * sizes.cp
    assert derived.dp * shards == sizes.world
    assert (
        derived.mini_per_rank * derived.dp * derived.optimizer_steps
        == derived.samples * sizes.ppo_epochs
    )
    if sizes.micro_batch_size is not None:
        assert derived.accumulation * sizes.micro_batch_size == derived.mini_per_rank


@given(random_sizes)
def test_a_suggested_train_batch_size_is_valid(sizes: Sizes):
    for message in violations(sizes):
        if "optimizer steps); nearest valid: train_batch_size=" in message:
            first = int(
                message.split("nearest valid: train_batch_size=")[1].split(" ")[0].rstrip(",")
            )
            assert not any(
                "optimizer steps)" in m for m in violations(replace(sizes, train_batch_size=first))
            )
