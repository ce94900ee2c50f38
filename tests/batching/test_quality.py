"""How near to perfect plans are on lengths whose best plan is known, and with unlike ranks."""

from __future__ import annotations

import time

import numpy as np
import pytest

from trainer.batching import CostModel, plan, static_plan
from trainer.batching.bounds import bins_bound
from trainer.batching.loops.multifit import multifit
from trainer.batching.packing import deal, fit_best


def test_lengths_that_fit_exactly_fill_every_micro_batch() -> None:
    """Three lengths that fill each micro-batch to the last token: nothing is left empty, nothing
    waits.
    """
    made = plan([600, 300, 100] * 16, 1000, 4)
    assert made.num_micro_batches == [4] * 4
    assert made.metrics()["batch/fill_ratio"] == 1.0
    assert made.gap == pytest.approx(0.0, abs=1e-12)


@pytest.mark.parametrize("sync", ["micro", "step"])
def test_long_tail_is_within_one_percent_of_the_bound(sync: str) -> None:
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(7, 1, 256).astype(int) + 1, 16384)
    made = plan(lengths, 16384, 8, sync, cost=CostModel(1.0, 1e-4))  # type: ignore[arg-type]
    assert made.gap < 0.01


def test_a_larger_card_takes_more_but_nobody_waits() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(100, 2000, 200)
    made = plan(lengths, [2000, 2000, 8000, 8000], 4, cost=CostModel(1.0, 1e-4))
    assert max(made.tokens[2]) <= 8000 and max(made.tokens[0]) <= 2000
    assert made.efficiency > 0.9
    once = plan(lengths, [2000, 2000, 8000, 8000], 4, "step", cost=CostModel(1.0, 1e-4))
    assert once.efficiency > 0.995
    assert once.num_micro_batches[2] < once.num_micro_batches[0]


def test_only_the_large_card_takes_what_only_it_can_hold() -> None:
    made = plan([5000, 100, 100, 100, 4500], [1000, 6000], 2)
    assert all(i not in mb for mb in made.micro_batches[0] for i in (0, 4))


def test_a_fixed_cost_per_micro_batch_keeps_their_number_down() -> None:
    rng = np.random.default_rng(2)
    lengths = rng.integers(1000, 7000, 64)
    dear = plan(lengths, 8000, 4, cost=CostModel(1.0, 1e-4, overhead=1e6))
    assert max(dear.num_micro_batches) <= max(
        plan(lengths, 8000, 4, cost=CostModel(1.0, 1e-4)).num_micro_batches
    )


def test_sharing_prompts_saves_them_and_keeps_balance() -> None:
    rng = np.random.default_rng(3)
    groups = np.repeat(np.arange(32), 8)
    prompts = np.repeat(rng.integers(50, 200, 32), 8)
    lengths = prompts + rng.integers(50, 400, 256)
    kwargs = {"groups": groups, "prompt_lengths": prompts, "cost": CostModel(1.0, 1e-4)}
    plain = plan(lengths, 4096, 4, **kwargs)
    shared = plan(lengths, 4096, 4, share_prompts=True, **kwargs)
    assert shared.tokens_saved > 0.8 * 7 / 8 * prompts.sum()
    assert shared.critical_path < 0.8 * plain.critical_path
    assert shared.gap < 0.05


def test_bound_on_the_path_counts_prompts_that_rows_carry() -> None:
    """One row holds everything, prompts too: nothing of them has to wait for another one."""
    prompts, groups, cost = [90, 40, 40, 40], [0, 1, 1, 1], CostModel(1.0, 1e-3)
    made = plan(
        [116, 96, 42, 44],
        162,
        2,
        groups=groups,
        prompt_lengths=prompts,
        share_prompts=True,
        cost=cost,
    )
    assert made.num_micro_batches == [1, 1]
    assert 0.9 < made.critical_path_bound / made.critical_path <= 1.0


def test_bound_on_the_step_knows_that_many_micro_batches_may_be_light_ones() -> None:
    made = plan([150, 228, 166, 86, 109, 140], 228, 2, "step", cost=CostModel(1.0, 1e-4, 50.0))
    assert sorted(made.num_micro_batches) == [2, 3]
    assert 0.97 < made.critical_path_bound / made.critical_path <= 1.0


def test_bound_on_bins_sees_what_cannot_stand_together() -> None:
    assert bins_bound(np.array([60, 60, 60, 60]), 100) == 4
    assert bins_bound(np.array([50, 50, 50, 50]), 100) == 2
    assert bins_bound(np.array([70, 70, 35, 35]), 100) == 3
    assert bins_bound(np.array([], dtype=np.int64), 100) == 0


def test_tight_steps_are_packed_evenly() -> None:
    """Best-fit leaves the last micro-batches nearly empty; multifit shortens the path that follows
    from it.
    """
    lengths = np.random.default_rng(6).integers(150, 600, 256)
    budgets, rows = np.full(8, 600), 23
    caps = np.tile(budgets, rows)

    def path(bins: np.ndarray) -> float:
        load = np.bincount(bins, lengths, minlength=caps.size)
        assert load.max() <= 600
        return float(load.reshape(rows, 8).max(1).sum())

    def evenly(bins: int) -> np.ndarray:
        sizes, least = lengths.tolist(), float(lengths.sum() / (600 * bins))
        cost = lengths.astype(np.float64).tolist()
        return np.array(multifit(cost, sizes, budgets.tolist(), [600] * bins, least))

    plain = fit_best(lengths, caps)
    assert plain is not None
    loads = np.bincount(plain, lengths, minlength=caps.size).astype(np.float64)
    assert path(evenly(caps.size)) < path(deal(loads, budgets)[plain])
    assert evenly(15 * 8)[0] == -1


def test_static_baseline_counts_its_padding() -> None:
    made = static_plan([10, 2, 4, 4], 2, 1)
    assert made.padding == 8
    assert made.metrics()["batch/pad_fraction"] == pytest.approx(8 / 28)


def test_planning_is_quick() -> None:
    """A generous ceiling for a busy machine; the benchmark holds the real bar."""
    lengths = np.random.default_rng(5).integers(50, 4000, 256)
    plan(lengths, 8192, 8)
    began = time.perf_counter()
    plan(lengths, 8192, 8)
    assert time.perf_counter() - began < 0.5
