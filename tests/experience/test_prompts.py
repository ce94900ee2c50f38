"""Prompts between steps: none lost, none doubled, whatever is left over."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.data.toy import Toy
from trainer.checkpoint.snapshot.state import decode, encode
from trainer.data import Example
from trainer.experience.prompts import Ask, Prompts, unfinished
from trainer.rollout import Sample

DATA = Toy(10_000)


def batches(size: int, start: int = 0) -> Iterator[list[Example]]:
    at = start
    while True:
        yield [DATA[i] for i in range(at, at + size)]
        at += size


def drawn(tokens: int, version: int, reason: str = "aborted") -> Sample:
    return Sample(torch.arange(tokens), -torch.rand(tokens), reason, version)  # type: ignore[arg-type]


@settings(deadline=None, max_examples=50)
@given(
    want=st.integers(1, 7),
    over=st.sampled_from([1.0, 1.25, 1.5, 3.0]),
    staleness=st.integers(0, 3),
    luck=st.lists(st.integers(0, 2**16), min_size=5, max_size=12),
    saved=st.booleans(),
)
def test_each_prompt_is_trained_on_once_and_none_is_skipped(
    want: int, over: float, staleness: int, luck: list[int], saved: bool
) -> None:
    prompts = Prompts(batches(want), over_sampling=over, max_staleness=staleness)
    trained: list[int] = []
    names: set[tuple[int, int]] = set()
    for step, seed in enumerate(luck, start=1):
        asks = prompts.take(want, step, version=step - 1)
        assert len(asks) >= want and len({a.example.index for a in asks}) == len(asks)
        assert len({(a.step, a.number) for a in asks}) == len(asks)
        for ask in asks:
            assert all(step - 1 - s.version <= staleness for s in ask.begun)
            if not ask.begun:
                assert ask.step == step and (ask.step, ask.number) not in names
            names.add((ask.step, ask.number))
        order = torch.randperm(len(asks), generator=torch.Generator().manual_seed(seed)).tolist()
        trained += [asks[i].example.index for i in order[:want]]
        parts = {i: [drawn((i + seed) % 3, step - 1)] * 2 for i in order[want:]}
        prompts.give_back(unfinished(asks, parts))
        if saved:
            state = decode(encode(prompts.state_dict()))
            again = Prompts(prompts._batches, over_sampling=over, max_staleness=staleness)
            again.load_state_dict(state, DATA)
            assert again.state_dict().keys() == state.keys()
            prompts = again
    left = [ask.example.index for ask in prompts._waiting]
    assert sorted(trained + left) == list(range(len(trained) + len(left)))


def test_partial_responses_come_back_with_their_names_and_old_ones_begin_anew() -> None:
    prompts = Prompts(batches(2), over_sampling=2.0, max_staleness=1)
    asks = prompts.take(2, 1, version=0)
    left = unfinished(asks, {3: [drawn(5, 0), drawn(0, 0)], 1: [drawn(0, 0), drawn(0, 0)]})
    assert [a.step for a in left] == [0, 1]  # nothing drawn: as if never begun
    prompts.give_back(left)
    second = prompts.take(2, 2, version=1)
    kept = next(a for a in second if a.begun)
    assert (kept.step, kept.number, kept.example) == (1, 3, asks[3].example)
    assert len(kept.begun[0].response_ids) == 5
    prompts.give_back([replace(kept)])
    third = prompts.take(1, 3, version=2)  # two iterations later
    assert not third[0].begun and third[0].step == 3


def test_what_took_long_last_time_is_begun_first() -> None:
    prompts = Prompts(batches(4))
    asks = prompts.take(4, 1, version=0)
    assert prompts.long_first(range(4), asks) == [0, 1, 2, 3]
    prompts.observe([a.example for a in asks[:3]], [10.0, 30.0, 20.0])
    assert prompts.long_first(range(4), asks) == [3, 1, 2, 0]
    begun = [
        *asks[:2],
        Ask(example=asks[2].example, step=1, number=2, begun=(drawn(3, 0),)),
        asks[3],
    ]
    assert prompts.long_first([0, 1, 2], begun) == [2, 1, 0]
