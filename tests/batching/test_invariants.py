"""What must hold for every plan, whatever the lengths."""

from __future__ import annotations

from itertools import groupby

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.batching import CostModel, Plan, assign_buckets, plan

QUICK = settings(max_examples=40, deadline=None)


@st.composite
def steps(draw: st.DrawFn) -> dict:
    """Arguments of plan() that have a plan."""
    n = draw(st.integers(0, 40))
    group_of = draw(st.lists(st.integers(0, 7), min_size=n, max_size=n))
    prompt = draw(st.lists(st.integers(0, 60), min_size=8, max_size=8))
    responses = draw(st.lists(st.integers(1, 90), min_size=n, max_size=n))
    prompts = [prompt[g] for g in group_of]
    lengths = [p + r for p, r in zip(prompts, responses, strict=True)]
    ranks = draw(st.integers(1, 6))
    longest = max(lengths, default=1)
    budgets = draw(st.lists(st.integers(1, 400), min_size=ranks, max_size=ranks))
    budgets[draw(st.integers(0, ranks - 1))] = longest + draw(st.integers(0, 300))
    share = draw(st.booleans())
    buckets = draw(st.none() | st.lists(st.integers(1, 120), max_size=3, unique=True).map(sorted))
    return {
        "lengths": lengths,
        "budget": budgets if draw(st.booleans()) else max(budgets),
        "ranks": ranks,
        "sync": draw(st.sampled_from(["micro", "step"])),
        "cost": CostModel(
            1.0, draw(st.sampled_from([0.0, 1e-3, 0.5])), draw(st.sampled_from([0.0, 5.0]))
        ),
        "groups": group_of,
        "prompt_lengths": prompts,
        "buckets": buckets,
        "bucket_by": draw(st.sampled_from(["prompt", "total"])),
        "keep_groups": draw(st.booleans()),
        "share_prompts": share,
    }


def held(case: dict, micro_batch: np.ndarray) -> int:
    """Tokens of a micro-batch, counted the slow way."""
    lengths, prompts, groups = case["lengths"], case["prompt_lengths"], case["groups"]
    if not case["share_prompts"]:
        return sum(lengths[i] for i in micro_batch)
    own = sum(lengths[i] - prompts[i] for i in micro_batch)
    return own + sum({groups[i]: prompts[i] for i in micro_batch}.values())


def weight(case: dict, micro_batch: np.ndarray) -> float:
    """Cost of a micro-batch, counted the slow way."""
    cost, lengths, prompts, groups = (
        case["cost"],
        case["lengths"],
        case["prompt_lengths"],
        case["groups"],
    )

    def one(n: int) -> float:
        return cost.linear * n + cost.quadratic * n * n

    if not case["share_prompts"]:
        return sum(one(lengths[i]) for i in micro_batch)
    own = sum(one(lengths[i]) - one(prompts[i]) for i in micro_batch)
    return own + sum(one(p) for p in {groups[i]: prompts[i] for i in micro_batch}.values())


def run(case: dict) -> Plan:
    return plan(**case)


@QUICK
@given(steps())
def test_each_sequence_exactly_once(case: dict) -> None:
    made = run(case)
    flat = [i for rank in made.micro_batches for mb in rank for i in mb.tolist()]
    assert sorted(flat) == list(range(len(case["lengths"])))


@QUICK
@given(steps())
def test_no_micro_batch_is_over_its_cap(case: dict) -> None:
    made = run(case)
    for rank, budget, tokens in zip(made.micro_batches, made.budgets, made.tokens, strict=True):
        for mb, said in zip(rank, tokens, strict=True):
            assert held(case, mb) == said <= budget


@QUICK
@given(steps())
def test_equal_counts_where_ranks_wait_and_never_none(case: dict) -> None:
    counts = run(case).num_micro_batches
    assert len(counts) == case["ranks"] and min(counts) >= 1
    if case["sync"] == "micro":
        assert len(set(counts)) == 1


@QUICK
@given(steps())
def test_buckets_never_mix(case: dict) -> None:
    if case["buckets"] is None:
        return
    by = case["prompt_lengths"] if case["bucket_by"] == "prompt" else case["lengths"]
    bucket = assign_buckets(by, case["buckets"])
    for rank in run(case).micro_batches:
        for mb in rank:
            assert len(set(bucket[mb].tolist())) <= 1


@QUICK
@given(steps())
def test_costs_and_bounds_are_true(case: dict) -> None:
    made = run(case)
    cost = case["cost"]
    loads = [[weight(case, mb) + cost.overhead for mb in rank] for rank in made.micro_batches]
    if case["sync"] == "micro":
        path = sum(max(column) for column in zip(*loads, strict=True))
    else:
        path = max(sum(rank) for rank in loads)
    assert made.critical_path == pytest.approx(path, abs=1e-9)
    assert made.critical_path_bound <= made.critical_path * (1 + 1e-12)
    assert made.micro_batches_bound <= max(made.num_micro_batches)
    assert made.tokens_saved == sum(case["lengths"]) - sum(map(sum, made.tokens)) >= 0


@QUICK
@given(steps())
def test_equal_inputs_give_equal_plans(case: dict) -> None:
    a, b = run(case), run(case)
    for left, right in zip(a.micro_batches, b.micro_batches, strict=True):
        assert [m.tolist() for m in left] == [m.tolist() for m in right]


@QUICK
@given(steps())
def test_heavy_micro_batches_come_first(case: dict) -> None:
    made = run(case)
    if case["sync"] == "micro":
        largest = [max(column) for column in zip(*made.tokens, strict=True)]
        assert largest == sorted(largest, reverse=True)
    else:
        assert all(rank == sorted(rank, reverse=True) for rank in made.tokens)


@QUICK
@given(steps())
def test_groups_stay_together_where_they_fit(case: dict) -> None:
    made = run({**case, "keep_groups": True, "buckets": None})
    small = int(made.budgets.min())
    where = {
        i: (r, k)
        for r, rank in enumerate(made.micro_batches)
        for k, mb in enumerate(rank)
        for i in mb.tolist()
    }
    order = sorted(range(len(case["lengths"])), key=lambda i: case["groups"][i])
    for _, members in groupby(order, key=lambda i: case["groups"][i]):
        group = np.array(list(members))
        if held(case, group) <= small:
            assert len({where[i] for i in group.tolist()}) == 1
