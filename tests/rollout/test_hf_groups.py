"""Groups in and groups out: few places for many, in pieces, stopped and gone on with."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models.support import VOCAB, make_model
from tests.rollout.support import engine, ids, sampling
from trainer.rollout import Finished, Group, Sample
from trainer.rollout.hf.cohort import Cohort

EOS = list(range(1, 9))
N = 4


def groups(
    count: int = 12, n: int = N, begun: dict[int, list[Sample]] | None = None
) -> list[Group]:
    """Prompts of 1 to 9 tokens, the first seen again as the last."""
    draw = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(10, VOCAB, (1 + i * 7 % 9,), generator=draw).tolist() for i in range(count)
    ]
    prompts[-1] = prompts[0]
    kept = begun or {}
    return [
        Group(prompt_ids=p, sample_ids=range(i * n, (i + 1) * n), step=3, begun=kept.get(i, ()))
        for i, p in enumerate(prompts)
    ]


def whole(model: nn.Module) -> list[Finished]:
    return list(
        engine(model, EOS, 256).generate(groups(), sampling(max_response_length=30), seed=17)
    )


def by_number(finished: list[Finished]) -> list[list[Sample]]:
    assert sorted(f.number for f in finished) == list(range(12))
    return [f.samples for f in sorted(finished, key=lambda f: f.number)]


def same(mine: list[list[Sample]], theirs: list[list[Sample]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert ids(a) == ids(b)
        assert [s.finish_reason for s in a] == [s.finish_reason for s in b]
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [3, 7])
def test_many_prompts_and_few_places(rows: int) -> None:
    model = make_model()
    used = engine(model, EOS, rows)
    finished = list(used.generate(groups(), sampling(max_response_length=30), seed=17))
    expected = by_number(whole(model))
    same(by_number(finished), expected)
    stats = used.stats()
    assert stats["tokens"] == sum(len(s.response_ids) for samples in expected for s in samples)
    assert 0.6 < stats["busy_rows"] <= 1, "places stay empty"


def test_groups_come_as_soon_as_they_are_complete() -> None:
    longest = [max(len(s.response_ids) for s in f.samples) for f in whole(make_model())]
    assert longest == sorted(longest)
    assert longest[0] < longest[-1]


def test_groups_are_begun_in_the_order_given() -> None:
    used = engine(make_model(), EOS, N)
    seen = []
    for finished in used.generate(groups(), sampling(), seed=17):
        seen.append(finished.number)
        if len(seen) == 1:
            assert used.stats()["tokens"] <= N * 12, "the first group waited for others"
    assert seen == list(range(12))


def test_a_prompt_is_computed_once_for_its_group_and_its_like() -> None:
    used = engine(make_model(), EOS)
    wanted = groups(6)
    list(used.generate(wanted, sampling(), seed=17))
    assert used.stats()["prompt_tokens"] == sum(len(g.prompt_ids) for g in wanted[:-1])


def test_long_and_short_prompts_attend_to_themselves_alone() -> None:
    """Enough of both that they are not padded to each other."""
    model = make_model()
    short = [Group(prompt_ids=[10 + i], sample_ids=[i], step=0) for i in range(20)]
    long = [
        Group(prompt_ids=[(7 * i + k) % VOCAB for k in range(40)], sample_ids=[i], step=0)
        for i in range(20, 40)
    ]
    together = engine(model, EOS).generate([*short, *long], sampling(), seed=17)
    found = {f.number: f.samples for f in together}
    apart = [
        f.samples
        for g in [*short, *long]
        for f in engine(model, EOS).generate([g], sampling(), seed=17)
    ]
    same([found[i] for i in range(40)], apart)


@pytest.mark.parametrize("rows", [3, 256])
@pytest.mark.parametrize("after", [1, 9])
def test_stopped_and_gone_on_with_is_as_if_never_stopped(rows: int, after: int) -> None:
    model = make_model()
    used = engine(model, EOS, rows)
    generation = used.generate(groups(), sampling(max_response_length=30), seed=17)
    first = []
    stream = iter(generation)
    for _ in range(after):
        first.append(next(stream))
    left = generation.stop()
    assert generation.stop() == []
    assert list(stream) == list(generation) == []
    by_number([*first, *left])
    begun = {f.number: f.samples for f in left}
    rest = [g for i, g in enumerate(groups(begun=begun)) if i in begun]
    numbers = sorted(begun)
    again = [
        Finished(number=numbers[f.number], samples=f.samples)
        for f in used.generate(rest, sampling(max_response_length=30), seed=17)
    ]
    same(by_number([*first, *again]), by_number(whole(model)))


def test_what_was_begun_keeps_its_version() -> None:
    used = engine(make_model(), EOS, 8)
    used.update_weights((), 4)
    generation = used.generate(groups(), sampling(max_response_length=30), seed=17)
    next(iter(generation))
    begun = {f.number: f.samples for f in generation.stop()}
    lengths = {i: [len(s.response_ids) for s in samples] for i, samples in begun.items()}
    assert any(any(n) for n in lengths.values()) and any(not any(n) for n in lengths.values())
    used.update_weights((), 5)
    rest = [g for i, g in enumerate(groups(begun=begun)) if i in begun]
    for finished, n in zip(
        sorted(
            used.generate(rest, sampling(max_response_length=30), seed=17), key=lambda f: f.number
        ),
        lengths.values(),
        strict=True,
    ):
        assert [s.version for s in finished.samples] == [4 if length else 5 for length in n]


def test_a_group_that_is_whole_already_comes_back_as_it_is() -> None:
    used = engine(make_model(), EOS)
    done = {0: whole(make_model())[0].samples}
    (again,) = used.generate(groups(1, begun=done), sampling(), seed=17)
    assert all(a is b for a, b in zip(again.samples, done[0], strict=True))
    assert used.stats()["tokens"] == 0


def test_a_sample_as_long_as_it_may_get_is_not_gone_on_with() -> None:
    cut = Sample(torch.tensor([20, 21]), torch.tensor([-1.0, -2.0]), "aborted")
    (done,) = engine(make_model()).generate(
        [Group(prompt_ids=[10], sample_ids=[0], step=0, begun=[cut])],
        sampling(max_response_length=2),
        seed=0,
    )
    assert (ids(done.samples), done.samples[0].finish_reason) == ([[20, 21]], "length")


def test_the_consumer_trains_between_groups_and_may_leave() -> None:
    model = make_model().train()
    for finished in engine(model, EOS).generate(groups(), sampling(), seed=17):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        log_probs = finished.samples[0].log_probs
        weight = torch.ones(len(log_probs), requires_grad=True)
        (weight * log_probs).sum().backward()  # type: ignore[no-untyped-call]
        break
    assert model.training


def test_ended_rows_cost_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step computes the living rows alone, and prompts without living rows are forgotten."""
    seen: list[tuple[int, int]] = []
    attend = Cohort.attend

    def watched(self: Cohort, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert len(query) == len(self.rows)
        if layer == 0:
            seen.append((len(self.rows), len(self.prefix[0][0])))
        return attend(self, layer, query, key, value)

    monkeypatch.setattr(Cohort, "attend", watched)
    expected = [s for f in whole(make_model()) for s in f.samples]
    assert sum(rows for rows, _ in seen) == sum(len(s.response_ids) - 1 for s in expected)
    assert seen[0][1] == 11 and seen[-1][1] < 6


def test_bfloat16_weights() -> None:
    model = make_model().bfloat16()
    prompt = [5, 9, 3]
    (done,) = engine(model, EOS).generate(
        [Group(prompt_ids=prompt, sample_ids=[0, 1], step=0)], sampling(), seed=1
    )
    for sample in done.samples:
        with torch.no_grad():
            logits = model(
                input_ids=torch.tensor([prompt + sample.response_ids.tolist()]), use_cache=False
            ).logits
        expected = (
            logits[0, 2:-1].float().log_softmax(-1).gather(1, sample.response_ids[:, None])[:, 0]
        )
        torch.testing.assert_close(sample.log_probs, expected, atol=0.3, rtol=0)


def test_bad_input_is_named() -> None:
    used = engine(make_model())
    with pytest.raises(ValueError, match="was given lm_head"):
        used.update_weights([("lm_head", torch.ones(1))], 1)
    cut = Sample(torch.tensor([20]), torch.tensor([-1.0]), "aborted")
    with pytest.raises(ValueError, match="group 0 has 2 sample ids but 1 samples"):
        used.generate(
            [Group(prompt_ids=[10], sample_ids=[0, 1], step=0, begun=[cut])], sampling(), seed=0
        )
    with pytest.raises(ValueError, match="at least one end token"):
        type(used)(used.module, eos_ids=[], max_num_seqs=1)


@pytest.mark.parametrize("pads", [0, 40, 10**9])
def test_cohorts_that_become_one_draw_the_same(monkeypatch: pytest.MonkeyPatch, pads: int) -> None:
    """Rows that began at different steps, behind prompts of different lengths, in one cache."""
    model = make_model()
    expected = by_number(whole(model))
    most, absorbed = [0], [0]
    attend, absorb = Cohort.attend, Cohort.absorb

    def watched(self: Cohort, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        most[0] = max(most[0], *self._starts)
        assert min(self._starts) == 0
        return attend(self, layer, query, key, value)

    def counted(self: Cohort, other: Cohort) -> None:
        absorbed[0] += 1
        absorb(self, other)

    monkeypatch.setattr(Cohort, "attend", watched)
    monkeypatch.setattr(Cohort, "absorb", counted)
    monkeypatch.setattr("trainer.rollout.hf.generation.PADS", {"cpu": pads})
    same(
        by_number(
            list(
                engine(model, EOS, 16).generate(groups(), sampling(max_response_length=30), seed=17)
            )
        ),
        expected,
    )
    assert (absorbed[0] > 0) is (pads > 0) and (most[0] > 0) is (pads > 0)
