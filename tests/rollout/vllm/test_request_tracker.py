"""The requests of a generation, the tokens that arrive for them, and what an abort leaves."""

from __future__ import annotations

import pytest
import torch

from trainer.base.errors import UserError
from trainer.rollout import Group, NotFiniteError, Sample, Sampling
from trainer.rollout.vllm.engine.requests import RequestTracker

SAMPLING = Sampling(max_response_length=6)


def group(*sample_ids: int, prompt: int = 3, begun: tuple[Sample, ...] = ()) -> Group:
    return Group(
        prompt_ids=list(range(10, 10 + prompt)),
        sample_ids=sample_ids,
        step=2,
        partial_samples=begun,
    )


def make_tracker(*groups: Group, version: int = 5) -> RequestTracker:
    return RequestTracker(groups, SAMPLING, seed=1, version=version, max_model_len=12)


def sample(count: int, reason: str = "aborted", version: int = 4) -> Sample:
    return Sample(torch.arange(count), -torch.ones(count), reason, version)  # type: ignore[arg-type]


def test_a_group_is_yielded_once_all_its_samples_have_ended() -> None:
    tracker = make_tracker(group(0, 1), group(2))
    first, second, third = tracker.unfinished
    assert [r.prompt_ids for r in tracker.unfinished] == [
        [10, 11, 12]
    ] * 3 and first.max_tokens == 6
    tracker.add_tokens(third.request_id, [7], [-0.5])
    tracker.finish(third.request_id, "stop")
    (done,) = tracker.pop_finished()
    assert done.number == 1 and done.samples[0].finished and done.samples[0].version == 5
    tracker.add_tokens(second.request_id, [1, 2], [-1.0, -2.0])
    tracker.finish(second.request_id, "length")
    assert list(tracker.pop_finished()) == []
    tracker.finish(first.request_id, "stop")
    (done,) = tracker.pop_finished()
    assert [s.response_ids.tolist() for s in done.samples] == [[], [1, 2]]
    assert (
        done.samples[1].log_probs.tolist() == [-1.0, -2.0]
        and done.samples[1].finish_reason == "length"
    )
    assert (
        tracker.stats() == {"tokens": 3.0, "prompt_tokens": 6.0}
        and list(tracker.pop_finished()) == tracker.abort() == []
    )


def test_partial_samples_are_continued_and_finished_ones_returned() -> None:
    ended = sample(2, "stop")
    tracker = make_tracker(group(0, 1, 2, 3, begun=(sample(2), ended, sample(0), sample(6))))
    first, third = tracker.unfinished
    assert first.prompt_ids == [10, 11, 12, 0, 1] and first.max_tokens == 4
    assert [(r.seed, r.step, r.sample_id, r.position) for r in (first, third)] == [
        (1, 2, 0, 2),
        (1, 2, 2, 0),
    ]
    for request in (first, third):
        tracker.add_tokens(request.request_id, [9], [-3.0])
        tracker.finish(request.request_id, "stop")
    (done,) = tracker.pop_finished()
    assert done.samples[0].response_ids.tolist() == [0, 1, 9] and done.samples[
        0
    ].log_probs.tolist() == [-1, -1, -3]
    assert done.samples[1] is ended and done.samples[3].finish_reason == "length"
    assert [s.version for s in done.samples] == [
        4,
        4,
        5,
        4,
    ]  # of the weights that drew the first token


def test_abort_returns_every_group_not_yet_yielded() -> None:
    tracker = make_tracker(group(0), group(1, 2), group(3))
    one, two, _, last = tracker.unfinished
    tracker.add_tokens(one.request_id, [1], [-1.0])
    tracker.finish(one.request_id, "stop")
    assert [d.number for d in tracker.pop_finished()] == [0]
    tracker.finish(last.request_id, "stop")
    tracker.add_tokens(two.request_id, [4, 5], [-1.0, -1.0])
    left = tracker.abort()
    assert [d.number for d in left] == [1, 2] and left[1].samples[0].finished
    assert [(s.finish_reason, len(s.response_ids)) for s in left[0].samples] == [
        ("aborted", 2),
        ("aborted", 0),
    ]
    assert tracker.unfinished == []


@pytest.mark.parametrize("log_prob", [float("nan"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error(log_prob: float) -> None:
    tracker = make_tracker(group(0))
    with pytest.raises(NotFiniteError):
        tracker.add_tokens(tracker.unfinished[0].request_id, [1], [log_prob])


def test_prompts_without_room_for_a_response_are_refused() -> None:
    with pytest.raises(UserError, match="prompt 0 of the batch is empty"):
        make_tracker(group(0, prompt=0))
    with pytest.raises(
        UserError,
        match=r"a prompt of 7 tokens and a response of 6 exceed the 12 tokens of the engine",
    ):
        make_tracker(group(0, prompt=7))
