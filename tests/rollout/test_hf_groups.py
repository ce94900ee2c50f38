"""Groups of responses: few rows for many prompts, stopped and continued, merged cohorts."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.models.support import VOCAB, make_model
from tests.rollout.support import engine, ids, sampling
from trainer.rollout import FinishedGroup, Group, Sample
from trainer.rollout.hf.cohort import Cohort

EOS = list(range(1, 9))
N = 4


def groups(
    count: int = 12, n: int = N, begun: dict[int, list[Sample]] | None = None
) -> list[Group]:
    """Prompts of 1 to 9 tokens; the last equals the first."""
    draw = torch.Generator().manual_seed(5)
    prompts = [
        torch.randint(10, VOCAB, (1 + i * 7 % 9,), generator=draw).tolist() for i in range(count)
    ]
    prompts[-1] = prompts[0]
    partial = begun or {}
    return [
        Group(
            prompt_ids=p,
            sample_ids=range(i * n, (i + 1) * n),
            step=3,
            partial_samples=partial.get(i, ()),
        )
        for i, p in enumerate(prompts)
    ]


def all_at_once(model: nn.Module) -> list[FinishedGroup]:
    return list(
        engine(model, EOS, 256).generate(groups(), sampling(max_response_length=30), seed=17)
    )


def by_number(finished: list[FinishedGroup]) -> list[list[Sample]]:
    assert sorted(f.number for f in finished) == list(range(12))
    return [f.samples for f in sorted(finished, key=lambda f: f.number)]


def assert_same(actual: list[list[Sample]], expected: list[list[Sample]]) -> None:
    for a, b in zip(actual, expected, strict=True):
        assert ids(a) == ids(b)
        assert [s.finish_reason for s in a] == [s.finish_reason for s in b]
        for x, y in zip(a, b, strict=True):
            torch.testing.assert_close(x.log_probs, y.log_probs, atol=1e-4, rtol=0)


@pytest.mark.parametrize("rows", [3, 7])
def test_many_prompts_and_few_rows(rows: int) -> None:
    model = make_model()
    used = engine(model, EOS, rows)
    finished = list(used.generate(groups(), sampling(max_response_length=30), seed=17))
    expected = by_number(all_at_once(model))
    assert_same(by_number(finished), expected)
    stats = used.stats()
    assert stats["tokens"] == sum(len(s.response_ids) for samples in expected for s in samples)
    assert 0.6 < stats["busy_rows"] <= 1, "rows stay empty"


def test_groups_are_handed_out_as_soon_as_they_are_complete() -> None:
    longest = [max(len(s.response_ids) for s in f.samples) for f in all_at_once(make_model())]
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


def test_equal_prompts_are_computed_once() -> None:
    used = engine(make_model(), EOS)
    requested = groups(6)
    list(used.generate(requested, sampling(), seed=17))
    assert used.stats()["prompt_tokens"] == sum(len(g.prompt_ids) for g in requested[:-1])


def test_long_and_short_prompts_only_attend_to_themselves() -> None:
    """Enough of both for cohorts of their own, without padding."""
    model = make_model()
    short = [Group(prompt_ids=[10 + i], sample_ids=[i], step=0) for i in range(20)]
    long = [
        Group(prompt_ids=[(7 * i + k) % VOCAB for k in range(40)], sample_ids=[i], step=0)
        for i in range(20, 40)
    ]
    together = engine(model, EOS).generate([*short, *long], sampling(), seed=17)
    samples = {f.number: f.samples for f in together}
    one_by_one = [
        f.samples
        for g in [*short, *long]
        for f in engine(model, EOS).generate([g], sampling(), seed=17)
    ]
    assert_same([samples[i] for i in range(40)], one_by_one)


@pytest.mark.parametrize("rows", [3, 256])
@pytest.mark.parametrize("after", [1, 9])
def test_a_stopped_generation_continues_as_if_never_stopped(rows: int, after: int) -> None:
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
        FinishedGroup(number=numbers[f.number], samples=f.samples)
        for f in used.generate(rest, sampling(max_response_length=30), seed=17)
    ]
    assert_same(by_number([*first, *again]), by_number(all_at_once(model)))


def test_a_partial_response_keeps_its_version() -> None:
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


def test_a_complete_group_is_returned_as_it_is() -> None:
    used = engine(make_model(), EOS)
    done = {0: all_at_once(make_model())[0].samples}
    (again,) = used.generate(groups(1, begun=done), sampling(), seed=17)
    assert all(a is b for a, b in zip(again.samples, done[0], strict=True))
    assert used.stats()["tokens"] == 0


def test_a_sample_of_the_longest_length_is_not_continued() -> None:
    cut = Sample(torch.tensor([20, 21]), torch.tensor([-1.0, -2.0]), "aborted")
    (done,) = engine(make_model()).generate(
        [Group(prompt_ids=[10], sample_ids=[0], step=0, partial_samples=[cut])],
        sampling(max_response_length=2),
        seed=0,
    )
    assert (ids(done.samples), done.samples[0].finish_reason) == ([[20, 21]], "length")


def test_the_consumer_may_train_between_groups_and_stop_early() -> None:
    model = make_model().train()
    for finished in engine(model, EOS).generate(groups(), sampling(), seed=17):
        assert torch.is_grad_enabled() and not torch.is_inference_mode_enabled()
        log_probs = finished.samples[0].log_probs
        weight = torch.ones(len(log_probs), requires_grad=True)
        (weight * log_probs).sum().backward()  # type: ignore[no-untyped-call]
        break
    assert model.training


def test_ended_rows_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A step computes active rows only, and prompts without active rows are dropped."""
    seen: list[tuple[int, int]] = []
    attend = Cohort.attend

    def watched(self: Cohort, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert len(query) == len(self.rows)
        if layer == 0:
            seen.append((len(self.rows), len(self.prompt_cache[0][0])))
        return attend(self, layer, query, key, value)

    monkeypatch.setattr(Cohort, "attend", watched)
    expected = [s for f in all_at_once(make_model()) for s in f.samples]
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
    with pytest.raises(ValueError, match="group 0 has 2 sample ids, but 1 partial samples"):
        used.generate(
            [Group(prompt_ids=[10], sample_ids=[0, 1], step=0, partial_samples=[cut])],
            sampling(),
            seed=0,
        )
    with pytest.raises(ValueError, match="at least one end token"):
        type(used)(used.module, eos_ids=[], max_num_seqs=1)


@pytest.mark.parametrize("cells", [0, 40, 10**9])
def test_merged_cohorts_sample_the_same(monkeypatch: pytest.MonkeyPatch, cells: int) -> None:
    """Rows that began at different steps, with prompts of different lengths, in one cache."""
    model = make_model()
    expected = by_number(all_at_once(model))
    largest_start = [0]
    merges = [0]
    attend = Cohort.attend
    merge = Cohort.merge

    def watched(self: Cohort, layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        largest_start[0] = max(largest_start[0], *self._starts)
        assert min(self._starts) == 0
        return attend(self, layer, query, key, value)

    def counted(self: Cohort, other: Cohort) -> None:
        merges[0] += 1
        merge(self, other)

    monkeypatch.setattr(Cohort, "attend", watched)
    monkeypatch.setattr(Cohort, "merge", counted)
    monkeypatch.setattr("trainer.rollout.hf.generation.MERGE_CELLS", {"cpu": cells})
    assert_same(
        by_number(
            list(
                engine(model, EOS, 16).generate(groups(), sampling(max_response_length=30), seed=17)
            )
        ),
        expected,
    )
    assert (merges[0] > 0) is (cells > 0) and (largest_start[0] > 0) is (cells > 0)
