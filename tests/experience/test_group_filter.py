"""Dynamic sampling: a step trains on prompts whose responses differ, from several rounds."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.helpers import minimal_settings
from tests.experience.collector_parts import DATA, SCORERS, make_collector, parity_reward
from tests.experience.test_collector import run
from trainer.base.errors import UserError
from trainer.checkpoint.snapshot.state import decode, encode
from trainer.config import load
from trainer.data import Example
from trainer.experience.collector import RolloutCollector
from trainer.experience.group_filter import GroupFilter
from trainer.experience.sampler import Rollouts
from trainer.ranks.agreement import AgreedError
from trainer.rewards import OverlongPenalty, Score
from trainer.rollout import Sample
from trainer.tracking import Timers

FILTERED: dict[str, Any] = {"most_rounds": 8, "reward": parity_reward}
MOSTLY_KEPT: dict[str, Any] = {"most_rounds": 8}
"""By length, which differs in most pairs: a second round gives more than a step needs."""


@pytest.fixture(autouse=True)
def _no_worker_outlives_a_test() -> Iterator[None]:
    yield
    while SCORERS:
        SCORERS.pop().close()


def rollouts_of(groups: list[list[Score]]) -> Rollouts:
    """Two responses to each of the prompts 0, 2, 4 ..."""
    return Rollouts(
        prompt_indices=[2 * i for i, group in enumerate(groups) for _ in group],
        samples=[Sample(torch.zeros(1), torch.zeros(1), "stop") for group in groups for _ in group],
        scores=[score for group in groups for score in group],
    )


def test_prompts_are_kept_whose_responses_differ_in_the_metric() -> None:
    penalty = OverlongPenalty(max_length=10, buffer=5, factor=1.0)
    plain = Score(value=1.0, extra={"format": 0.0})
    formatted = Score(value=1.0, extra={"format": 1.0})
    wrong = Score(value=0.0, extra={"format": 0.0, "acc": 0.0})
    groups = [
        [plain, formatted],  # differ in format
        [plain, penalty.applied(plain, 8)],  # differ in the penalty
        [plain, wrong],  # differ in the score
        [wrong, wrong],
    ]
    for metric, kept in {"format": [0], "seq_reward": [2, 4], "acc": [4], "score": [4]}.items():
        made = GroupFilter(metric=metric, most_rounds=3, n=2).kept(rollouts_of(groups))
        assert made == kept, metric


def test_a_metric_that_no_reward_function_returned_is_named() -> None:
    scores = [Score(value=1.0, extra={"format": 0.0, "steps": 2.0})] * 2
    with pytest.raises(UserError, match=r"metric=quality, but .* returned format, steps: set it"):
        GroupFilter(metric="quality", most_rounds=3, n=2).kept(rollouts_of([scores]))


def counted(collector: RolloutCollector) -> list[int]:
    """The indices of the examples that the loader gives, as it gives them."""
    loaded: list[int] = []
    batches = collector.prompts._batches

    def counting() -> Iterator[list[Example]]:
        for batch in batches:
            loaded.extend(example.index for example in batch)
            yield batch

    collector.prompts._batches = counting()
    return loaded


def test_every_step_is_full_of_prompts_that_differ_and_no_other_is_trained_on() -> None:
    """What the rounds give beyond a batch is the first of the next step."""
    collector, engine, _ = make_collector(**FILTERED)
    loaded = counted(collector)
    trained: list[int] = []
    for step in range(1, 4):
        requests, rollouts = collector.collect(step, step - 1, Timers(), last=step == 3)
        groups = rollouts.prompt_indices[::2]
        assert groups == sorted(set(groups)) and len(groups) == 4
        for k in range(0, 8, 2):
            assert rollouts.scores[k].value != rollouts.scores[k + 1].value
        numbers = [(request.step, request.number) for request in requests]
        assert len(set(numbers)) == len(numbers)  # no two rounds draw with the same numbers
        stats = collector.stats()
        assert stats["rollout/num_gen_batches"] == len(requests) / 4
        assert stats["rollout/kept_prompts"] == 4
        assert 4 / len(requests) <= stats["rollout/kept_share"] < 1
        collector.record_lengths(groups, [1.0] * 4)
        trained += [requests[g].example.index for g in groups]
        engine.train()
    assert trained == sorted(trained)
    waiting = [request.example.index for request in collector.prompts._waiting]
    assert set(trained) | set(waiting) <= set(loaded)
    assert len(loaded) > len(trained) + len(waiting)  # some were left out
    assert not set(trained) & set(waiting)


def test_responses_beyond_a_batch_are_kept_where_old_ones_may_be_trained_on() -> None:
    collector, engine, _ = make_collector(**MOSTLY_KEPT, max_staleness=1, copied=True)
    versions = []
    for step in range(1, 5):
        _, rollouts = collector.collect(step, step - 1, Timers(), last=step == 4)
        versions.append({step - 1 - sample.version for sample in rollouts.samples})
        engine.train()
    assert set().union(*versions) == {0, 1}


@pytest.mark.parametrize(
    "settings",
    [
        FILTERED,
        {**MOSTLY_KEPT, "max_staleness": 1, "copied": True},
        {**FILTERED, "over_sampling": 1.5, "max_staleness": 2},
        {**FILTERED, "copied": True, "max_staleness": 1, "one_step_off": True},
    ],
)
def test_a_resumed_run_draws_the_same(settings: dict[str, Any]) -> None:
    whole, engine, _ = make_collector(**settings)
    loaded = counted(whole)
    run(whole, engine, last=2)
    whole.drain()
    saved = encode(whole.prompts.state_dict())
    position = len(loaded)
    rest = run(whole, engine, first=3)
    again, other, _ = make_collector(**settings)
    again.prompts.load_state_dict(decode(saved), DATA)
    for _ in range(position // 4):
        next(again.prompts._batches)
    other.train()
    other.train()
    assert run(again, other, first=3) == rest
    whole.close()
    again.close()


def test_a_step_that_is_not_full_after_its_rounds_trains_on_what_there_is() -> None:
    collector, _, _ = make_collector(most_rounds=1, reward=parity_reward)
    _, rollouts = collector.collect(1, 0, Timers(), last=False)
    kept = len(rollouts.scores) // 2
    assert 0 < kept < 4 and collector.stats()["rollout/kept_prompts"] == kept


def constant(**_: Any) -> float:
    return 0.5


def test_a_reward_that_never_varies_ends_after_its_rounds_and_loses_no_prompt() -> None:
    collector, _, _ = make_collector(most_rounds=3, reward=constant)
    loaded = counted(collector)
    for _ in range(2):
        with pytest.raises(AgreedError, match=r"after 3 rounds .* each of 12 prompts .* same acc"):
            collector.collect(1, 0, Timers(), last=False)
        assert loaded == list(range(12))
    assert [request.example.index for request in collector.prompts._waiting] == list(range(12))


def test_the_prompts_of_all_ranks_count() -> None:
    """Another rank keeps a prompt in the first round, so that a second one is not needed."""
    alone, _, _ = make_collector(**FILTERED)
    requests, rollouts = alone.collect(1, 0, Timers(), last=False)
    kept = rollouts.prompt_indices[::2]
    assert len(requests) == 8 and sum(index < 4 for index in kept) == 3
    collector, _, _ = make_collector(**FILTERED)
    answers = iter([[9]])
    world: Any = collector._world
    shared = SimpleNamespace(**vars(world))
    shared.gather = lambda value: [value, next(answers, [])]
    collector._world = shared
    requests, rollouts = collector.collect(1, 0, Timers(), last=False)
    assert len(requests) == 4
    assert rollouts.prompt_indices[::2] == kept[:3]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"actor_rollout_ref.rollout.n": 1, "algorithm.adv_estimator": "remax"}, "but actor_ro"),
        ({"algorithm.filter_groups.metric": "seq_final_reward"}, "set it to acc, score or seq_re"),
        ({"algorithm.filter_groups.max_num_gen_batches": 0}, "max_num_gen_batches"),
    ],
)
def test_settings_that_filter_nothing_or_without_end_are_refused(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        load(minimal_settings(**{"algorithm.filter_groups.enable": True, **changes}))
