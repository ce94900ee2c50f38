"""A stop leaves the rollouts of a step, and the step that is taken later is the same one."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.experience.collector_parts import SCORERS, make_collector, parity_reward
from tests.experience.test_collector import run
from trainer.base import signals
from trainer.base.signals import StopRequested
from trainer.experience.collector import RolloutCollector
from trainer.rollout.hf.generation import HfGeneration
from trainer.tracking import Timers

OVER_SAMPLED = {"over_sampling": 1.5, "max_staleness": 2}
FILTERED: dict[str, Any] = {"most_rounds": 8, "reward": parity_reward}
KEEPS = {"copied": True, "max_staleness": 1}


@pytest.fixture(autouse=True)
def _no_worker_outlives_a_test() -> Iterator[None]:
    yield
    while SCORERS:
        SCORERS.pop().close()


class Stop:
    """Requests a stop, as a signal does, once so many tokens are sampled per response."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._patch.setattr(signals._request, "cause", None)
        self.after: int | None = None
        step = HfGeneration._step

        def counting(generation: HfGeneration) -> Any:
            if self.after is not None:
                self.after -= 1
                if self.after == 0:
                    self.now()
            return step(generation)

        monkeypatch.setattr(HfGeneration, "_step", counting)

    def now(self) -> None:
        self._patch.setattr(signals._request, "cause", "USR2")

    def over(self) -> None:
        """As in the next attempt."""
        self.after = None
        self._patch.setattr(signals._request, "cause", None)


@pytest.fixture
def stop(monkeypatch: pytest.MonkeyPatch) -> Stop:
    return Stop(monkeypatch)


def leave(collector: RolloutCollector, step: int) -> None:
    with pytest.raises(StopRequested, match="USR2"):
        collector.collect(step, step - 1, Timers(), last=False)
    collector.give_back(step)


@pytest.mark.parametrize("settings", [{}, OVER_SAMPLED, {"copied": True}, FILTERED])
@pytest.mark.parametrize("after", [1, 6, 15])
def test_a_step_left_in_its_rollouts_is_generated_again_as_it_was(
    stop: Stop, settings: dict[str, Any], after: int
) -> None:
    whole = run(*make_collector(**settings)[:2])
    collector, engine, _ = make_collector(**settings)
    first = run(collector, engine, last=2)
    stop.after = after
    leave(collector, 3)
    assert collector.sampler.scorer.idle() == []  # their processes have ended
    stop.over()
    assert first + run(collector, engine, first=3) == whole


@pytest.mark.parametrize("settings", [{}, OVER_SAMPLED, FILTERED])
def test_a_step_left_after_its_rollouts_is_generated_again_as_it_was(
    stop: Stop, settings: dict[str, Any]
) -> None:
    whole = run(*make_collector(**settings)[:2])
    collector, engine, _ = make_collector(**settings)
    first = run(collector, engine, last=1)
    before = collector.prompts.state_dict()
    collector.collect(2, 1, Timers(), last=False)
    collector.give_back(2)
    assert collector.prompts.state_dict()["lengths"] == before["lengths"]
    assert first + run(collector, engine, first=2) == whole


def test_where_old_samples_are_allowed_those_of_a_separate_engine_are_kept(stop: Stop) -> None:
    whole = run(*make_collector(**KEEPS)[:2])
    collector, engine, _ = make_collector(**KEEPS)
    first = run(collector, engine, last=1)
    stop.after = 6
    leave(collector, 2)
    kept = collector.prompts._waiting[:4]
    begun = [sum(len(s.response_ids) for s in request.partial_samples) for request in kept]
    assert sum(begun) > 0 and {request.step for request in kept} == {2}
    stop.over()
    drawn = first + run(collector, engine, first=2)
    tokens = [[(index, ids) for index, ids, *_ in rows] for rows in drawn]
    assert tokens == [[(index, ids) for index, ids, *_ in rows] for rows in whole]


def test_what_is_generated_ahead_is_left_too_and_no_prompt_is_lost(stop: Stop) -> None:
    collector, engine, _ = make_collector(**KEEPS, one_step_off=True)
    first = run(collector, engine, last=1)
    stop.now()
    with pytest.raises(StopRequested):
        collector.drain()
    stop.over()
    rest = run(collector, engine, first=2)
    assert [[i for i, *_ in rows[::2]] for rows in first + rest] == [
        [0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 14, 15]
    ]  # fmt: skip
    collector.close()


def test_a_step_left_while_the_next_is_generated_ahead_loses_neither(stop: Stop) -> None:
    collector, engine, _ = make_collector(**KEEPS, one_step_off=True)
    first = run(collector, engine, last=1)
    _, rollouts = collector.collect(2, 1, Timers(), last=False)
    stop.now()
    collector.give_back(2)
    waiting = [request.example.index for request in collector.prompts._waiting]
    assert waiting == [4, 5, 6, 7, 8, 9, 10, 11]
    assert [s.response_ids.tolist() for s in rollouts.samples] == [
        s.response_ids.tolist()
        for request in collector.prompts._waiting[:4]
        for s in request.partial_samples
    ]
    stop.over()
    assert len(first + run(collector, engine, first=2)) == 4
    collector.close()
