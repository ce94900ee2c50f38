"""The books of a generation: what is asked for, what comes back, and what a stop leaves."""

from __future__ import annotations

import pytest
import torch

from trainer.base.errors import UserError
from trainer.rollout import Group, NotFiniteError, Sample, Sampling
from trainer.rollout.vllm.engine.requests import Tally

SAMPLING = Sampling(max_response_length=6)


def group(*sample_ids: int, prompt: int = 3, begun: tuple[Sample, ...] = ()) -> Group:
    return Group(
        prompt_ids=list(range(10, 10 + prompt)), sample_ids=sample_ids, step=2, begun=begun
    )


def tally(*groups: Group, version: int = 5) -> Tally:
    return Tally(groups, SAMPLING, seed=1, version=version, max_model_len=12)


def sample(count: int, reason: str = "aborted", version: int = 4) -> Sample:
    return Sample(torch.arange(count), -torch.ones(count), reason, version)  # type: ignore[arg-type]


def test_a_group_is_handed_out_once_all_its_samples_ended() -> None:
    books = tally(group(0, 1), group(2))
    first, second, third = books.open
    assert [r.prompt_ids for r in books.open] == [[10, 11, 12]] * 3 and first.max_tokens == 6
    books.add(third.key, [7], [-0.5])
    books.end(third.key, "stop")
    (done,) = books.take()
    assert done.number == 1 and done.samples[0].finished and done.samples[0].version == 5
    books.add(second.key, [1, 2], [-1.0, -2.0])
    books.end(second.key, "length")
    assert list(books.take()) == []
    books.end(first.key, "stop")
    (done,) = books.take()
    assert [s.response_ids.tolist() for s in done.samples] == [[], [1, 2]]
    assert (
        done.samples[1].log_probs.tolist() == [-1.0, -2.0]
        and done.samples[1].finish_reason == "length"
    )
    assert (
        books.stats() == {"tokens": 3.0, "prompt_tokens": 6.0}
        and list(books.take()) == books.stop() == []
    )


def test_what_was_begun_is_gone_on_with_and_what_was_ended_comes_back() -> None:
    ended = sample(2, "stop")
    books = tally(group(0, 1, 2, 3, begun=(sample(2), ended, sample(0), sample(6))))
    first, third = books.open
    assert first.prompt_ids == [10, 11, 12, 0, 1] and first.max_tokens == 4
    assert [(r.seed, r.step, r.sample_id, r.position) for r in (first, third)] == [
        (1, 2, 0, 2),
        (1, 2, 2, 0),
    ]
    for request in (first, third):
        books.add(request.key, [9], [-3.0])
        books.end(request.key, "stop")
    (done,) = books.take()
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


def test_a_stop_gives_every_group_that_was_not_handed_out() -> None:
    books = tally(group(0), group(1, 2), group(3))
    one, two, _, last = books.open
    books.add(one.key, [1], [-1.0])
    books.end(one.key, "stop")
    assert [d.number for d in books.take()] == [0]
    books.end(last.key, "stop")
    books.add(two.key, [4, 5], [-1.0, -1.0])
    left = books.stop()
    assert [d.number for d in left] == [1, 2] and left[1].samples[0].finished
    assert [(s.finish_reason, len(s.response_ids)) for s in left[0].samples] == [
        ("aborted", 2),
        ("aborted", 0),
    ]
    assert books.open == []


@pytest.mark.parametrize("log_prob", [float("nan"), float("-inf")])
def test_logits_that_are_not_finite_are_an_error(log_prob: float) -> None:
    books = tally(group(0))
    with pytest.raises(NotFiniteError):
        books.add(books.open[0].key, [1], [log_prob])


def test_prompts_that_leave_no_room_are_refused() -> None:
    with pytest.raises(UserError, match="an empty prompt"):
        tally(group(0, prompt=0))
    with pytest.raises(
        UserError, match=r"a prompt of 7 tokens and a response of 6 are more than the 12"
    ):
        tally(group(0, prompt=7))
