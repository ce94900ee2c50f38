"""Prompts between steps: none is lost or repeated, whichever are left unfinished."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.toy import Toy
from trainer.checkpoint.snapshot.state import decode, encode
from trainer.data import Example
from trainer.experience.prompt_queue import PromptQueue, PromptRequest, to_resume
from trainer.rollout import Sample

DATA = Toy(10_000)


def batches(size: int, start: int = 0) -> Iterator[list[Example]]:
    first = start
    while True:
        yield [DATA[i] for i in range(first, first + size)]
        first += size


def sample(tokens: int, version: int, reason: str = "aborted") -> Sample:
    return Sample(torch.arange(tokens), -torch.rand(tokens), reason, version)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(
    batch_size=st.integers(1, 7),
    over=st.sampled_from([1.0, 1.25, 1.5, 3.0]),
    staleness=st.integers(0, 3),
    seeds=st.lists(st.integers(0, 2**16), min_size=5, max_size=12),
    saved=st.booleans(),
)
def test_each_prompt_is_trained_on_once_and_none_is_skipped(
    batch_size: int, over: float, staleness: int, seeds: list[int], saved: bool
) -> None:
    prompts = PromptQueue(batches(batch_size), over_sampling=over, max_staleness=staleness)
    trained: list[int] = []
    random_keys: set[tuple[int, int]] = set()
    for step, seed in enumerate(seeds, start=1):
        requests = prompts.take(batch_size, step, version=step - 1)
        assert len(requests) >= batch_size and len({r.example.index for r in requests}) == len(
            requests
        )
        assert len({(r.step, r.number) for r in requests}) == len(requests)
        for request in requests:
            assert all(step - 1 - s.version <= staleness for s in request.partial_samples)
            if not request.partial_samples:
                assert request.step == step and (request.step, request.number) not in random_keys
            random_keys.add((request.step, request.number))
        order = torch.randperm(
            len(requests), generator=torch.Generator().manual_seed(seed)
        ).tolist()
        trained += [requests[i].example.index for i in order[:batch_size]]
        unfinished = {i: [sample((i + seed) % 3, step - 1)] * 2 for i in order[batch_size:]}
        prompts.put_back(to_resume(requests, unfinished))
        if saved:
            state = decode(encode(prompts.state_dict()))
            again = PromptQueue(prompts._batches, over_sampling=over, max_staleness=staleness)
            again.load_state_dict(state, DATA)
            assert again.state_dict().keys() == state.keys()
            prompts = again
    left = [request.example.index for request in prompts._waiting]
    assert sorted(trained + left) == list(range(len(trained) + len(left)))


def test_partial_responses_keep_their_random_numbers_and_stale_ones_begin_anew() -> None:
    prompts = PromptQueue(batches(2), over_sampling=2.0, max_staleness=1)
    requests = prompts.take(2, 1, version=0)
    left = to_resume(requests, {3: [sample(5, 0), sample(0, 0)], 1: [sample(0, 0), sample(0, 0)]})
    assert [r.step for r in left] == [0, 1]  # without any token: as if never begun
    prompts.put_back(left)
    second = prompts.take(2, 2, version=1)
    kept = next(r for r in second if r.partial_samples)
    assert (kept.step, kept.number, kept.example) == (1, 3, requests[3].example)
    assert len(kept.partial_samples[0].response_ids) == 5
    prompts.put_back([replace(kept)])
    third = prompts.take(1, 3, version=2)  # two steps later
    assert not third[0].partial_samples and third[0].step == 3


def test_prompts_with_the_longest_last_responses_begin_first() -> None:
    prompts = PromptQueue(batches(4))
    requests = prompts.take(4, 1, version=0)
    assert prompts.longest_first(range(4), requests) == [0, 1, 2, 3]
    prompts.record_lengths([r.example for r in requests[:3]], [10.0, 30.0, 20.0])
    assert prompts.longest_first(range(4), requests) == [3, 1, 2, 0]
    begun = [
        *requests[:2],
        PromptRequest(
            example=requests[2].example, step=1, number=2, partial_samples=(sample(3, 0),)
        ),
        requests[3],
    ]
    assert prompts.longest_first([0, 1, 2], begun) == [2, 1, 0]


def test_a_checkpoint_of_earlier_code_is_restored() -> None:
    """The names in it stay, although those in the code have changed."""
    begun = {
        "response_ids": torch.tensor([20, 21]),
        "log_probs": torch.tensor([-1.0, 0.0]),
        "finish_reason": "aborted",
        "version": 6,
        "written": torch.tensor([True, False]),
    }
    state = {
        "waiting": [
            {"index": 5, "step": 7, "number": 3, "begun": [begun]},
            {"index": 8, "step": 0, "number": 0, "begun": []},
        ],
        "lengths": {5: 12.5},
    }
    prompts = PromptQueue(batches(2))
    prompts.load_state_dict(decode(encode(state)), DATA)
    assert [r.example.index for r in prompts._waiting] == [5, 8]
    request = prompts._waiting[0]
    assert (request.step, request.number) == (7, 3)
    (partial,) = request.partial_samples
    assert partial.response_ids.tolist() == [20, 21] and partial.version == 6
    assert partial.mask().tolist() == [True, False]
    assert encode(prompts.state_dict()) == encode(state)
