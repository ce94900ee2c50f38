"""Responses of several turns: masks, log-probs, limits, and stopping in the middle of a turn."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data.templates import THINKING, tokenizer
from tests.models.support import make_model
from trainer.base import signals
from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.data.chat_template import ChatTemplate
from trainer.models import load_tokenizer, resolve
from trainer.rollout import FinishedGroup, Group, Sample, Sampling
from trainer.rollout.agent import AgentRunner, Conversation
from trainer.rollout.hf import HfEngine
from trainer.rollout.load_agent import load_agent
from trainer.rollout.template import ObservationTokens
from trainer.rollout.turns import MultiTurnGenerator, count_turns

EOS = [1, 2, 3, 4, 5, 6]
"""Enough of 64 tokens that a model with random weights ends its turns soon."""
GROUPS = [Group(prompt_ids=[9, 8 + i, 7], sample_ids=[2 * i, 2 * i + 1], step=1) for i in range(5)]
SAMPLING = Sampling(max_response_length=40)


class FixedTokens:
    """The same tokens for every answer."""

    def ids(self, text: str) -> list[int]:
        return [20, 21, 22] if text else []


class NumberTokenizer:
    """Decodes ids as numbers."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


class Echo:
    """Answers each turn until the model writes token 13: its answers depend on the samples."""

    async def step(self, conversation: Conversation) -> str | None:
        words = conversation.messages[-1]["content"].split()
        return None if "13" in words else f"you said {len(words)}"


@cache
def model() -> Any:
    return make_model("llama")


def make_generator(
    agent: Any = None, max_turns: int = 4, max_num_seqs: int = 64
) -> MultiTurnGenerator:
    return MultiTurnGenerator(
        HfEngine(model(), eos_ids=EOS, max_num_seqs=max_num_seqs),
        AgentRunner(agent or Echo(), name="echo", timeout_s=100),
        tokenizer=NumberTokenizer(),
        observations=FixedTokens(),  # type: ignore[arg-type]
        eos_ids=EOS,
        max_turns=max_turns,
    )


def by_number(groups: list[FinishedGroup]) -> dict[int, list[Sample]]:
    return {group.number: group.samples for group in groups}


def token_ids(samples: dict[int, list[Sample]]) -> dict[int, list[list[int]]]:
    return {i: [s.response_ids.tolist() for s in row] for i, row in samples.items()}


def test_the_mask_marks_the_models_tokens_whose_log_probs_are_those_of_the_response() -> None:
    groups = by_number(list(make_generator().generate(GROUPS, SAMPLING, seed=3)))
    assert sorted(groups) == list(range(5))
    several = 0
    for i, samples in groups.items():
        for sample in samples:
            assert 0 < len(sample.response_ids) <= 40
            mask = torch.ones(len(sample.response_ids), dtype=torch.bool)
            if sample.response_mask is not None:
                several += 1
                mask = sample.response_mask
                ids = sample.response_ids[~mask]
                assert ids.tolist() == [20, 21, 22] * (len(ids) // 3)
                assert bool((sample.log_probs[~mask] == 0).all())
            assert count_turns(sample) <= 4
            whole = torch.tensor([[*GROUPS[i].prompt_ids, *sample.response_ids.tolist()]])
            with torch.no_grad():
                logits = model()(input_ids=whole, use_cache=False).logits[0, 2:-1]
            expected = logits.log_softmax(-1).gather(1, sample.response_ids[:, None])[:, 0]
            torch.testing.assert_close(sample.log_probs[mask], expected[mask], atol=1e-4, rtol=0)
    assert several >= 5


@pytest.mark.parametrize("after", [0, 1, 3])
def test_a_stopped_generation_continues_as_if_never_stopped(after: int) -> None:
    whole = token_ids(
        by_number(list(make_generator(max_num_seqs=4).generate(GROUPS, SAMPLING, seed=3)))
    )
    generation = make_generator(max_num_seqs=4).generate(GROUPS, SAMPLING, seed=3)
    first: dict[int, list[Sample]] = {}
    stream = iter(generation)
    while len(first) < after:
        group = next(stream)
        first[group.number] = group.samples
    left = by_number(generation.stop())
    assert set(first) | set(left) == set(range(5)) and not set(first) & set(left)
    numbers = sorted(left)
    rest = make_generator().generate(
        [replace(GROUPS[i], partial_samples=left[i]) for i in numbers], SAMPLING, seed=3
    )
    samples = first | {numbers[group.number]: group.samples for group in rest}
    assert token_ids(samples) == whole


def test_a_response_ends_when_no_turn_or_no_room_is_left() -> None:
    for sample in by_number(list(make_generator(max_turns=2).generate(GROUPS, SAMPLING, seed=3)))[
        0
    ]:
        assert count_turns(sample) <= 2
    short = Sampling(max_response_length=5)
    for samples in by_number(list(make_generator().generate(GROUPS, short, seed=3))).values():
        assert all(len(s.response_ids) <= 5 for s in samples)
        assert all(s.finish_reason in ("stop", "length") for s in samples)


class Slow:
    async def step(self, conversation: Conversation) -> str | None:
        import asyncio

        await asyncio.sleep(30)
        return "late"


class Raises:
    async def step(self, conversation: Conversation) -> str | None:
        raise KeyError("price")


class Wrong:
    async def step(self, conversation: Conversation) -> Any:
        return 7


TALK = Conversation(prompt="?", messages=[{"role": "assistant", "content": "2 + 2"}])


def test_an_agent_that_is_late_is_answered_for() -> None:
    runner = AgentRunner(Slow(), name="Slow", timeout_s=0.05)
    assert runner.answer([TALK, TALK]) == ["error: no answer within 0.05 s"] * 2
    runner.close()


@pytest.mark.parametrize(
    ("agent", "message"),
    [(Raises(), "KeyError: 'price' (test_turns.py:"), (Wrong(), "returned int")],
)
def test_an_agent_that_fails_is_a_user_error(agent: Any, message: str) -> None:
    with pytest.raises(UserError) as error:
        AgentRunner(agent, name="mine", timeout_s=100).answer([TALK])
    assert message in str(error.value) and "mine" in str(error.value)


def test_agents_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Search:\n    async def step(self, conversation): return None\nclass Sync:\n    def "
        "step(self): 1\n"
    )
    assert type(load_agent("calculator", None)).__name__ == "Calculator"
    assert type(load_agent("Search", str(file))).__name__ == "Search"
    for name, path, message in [
        ("calculater", None, "did you mean 'calculator'"),
        ("Serch", str(file), "did you mean 'Search'"),
        ("Sync", str(file), "has no 'async def step"),
        ("Search", str(tmp_path / "min.py"), "there is no file"),
    ]:
        with pytest.raises(UserError, match=r"actor_rollout_ref\.rollout\.agent") as error:
            load_agent(name, path)
        assert message in str(error.value)


@pytest.mark.parametrize("source", ["builtin:tiny"])
def test_an_answer_is_rendered_as_the_template_would(source: str) -> None:
    tokenizer = load_tokenizer(resolve(source), source)
    template = ChatTemplate(tokenizer)
    ids = ObservationTokens(tokenizer, template, max_length=8).ids("42")
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2 + 2"}]
    whole = tokenizer.apply_chat_template(
        [*turns, {"role": "tool", "content": "42"}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer.apply_chat_template(turns[:1], add_generation_prompt=True, tokenize=False)
    joined = tokenizer.decode(
        [*tokenizer(prompt + "2 + 2")["input_ids"], tokenizer.eos_token_id, *ids]
    )
    assert joined.replace(" ", "") == whole.replace(" ", "")
    long = ObservationTokens(tokenizer, ChatTemplate(tokenizer), max_length=4).ids(
        "1 2 3 4 5 6 7 8 9 " * 9
    )
    assert len(long) <= len(ids) + 4


def test_a_template_that_changes_earlier_turns_still_appends_answers() -> None:
    """Qwen3's writes an empty thought into a last turn: no rendered text is a prefix of a longer
    one, but what comes after the end token is the same.
    """
    template = ChatTemplate(tokenizer(), THINKING)
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2 + 2"}]
    answer = {"role": "tool", "content": "42"}
    rendered = template.render([*turns, answer], open_next=True)
    assert not rendered.startswith(template.render(turns, open_next=False))
    ids = ObservationTokens(tokenizer(), template, max_length=8).ids("42")
    assert tokenizer().decode(ids) == (
        "\n<|user|><tool_response>42</tool_response><|end|>\n<|assistant|>"
    )
    assert rendered.endswith(tokenizer().decode(ids))


def test_a_template_without_later_turns_is_refused() -> None:
    for template, reason in (
        ("{{ messages[0].content }}", "leaves out earlier turns of the assistant"),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}", "doesn't close .* <|end|>"),
        (
            "{% for m in messages[:2] %}{{ m.content }}<|end|>{% endfor %}",
            "leaves out a message of role tool and leaves out a message of role user",
        ),
    ):
        with pytest.raises(UserError, match=f"since the model's chat template {reason}"):
            ObservationTokens(tokenizer(), ChatTemplate(tokenizer(), template), max_length=8)


def test_a_stop_does_not_wait_for_an_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    runner = AgentRunner(Slow(), name="Slow", timeout_s=200)
    monkeypatch.setattr(signals._request, "cause", "USR2")
    with pytest.raises(StopRequested):
        runner.answer([TALK])


class AsksToStop(Echo):
    """Answers as ``Echo``, and is late in its fourth call, when the run is asked to stop."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.patch = patch
        self.calls = 0

    async def step(self, conversation: Conversation) -> str | None:
        self.calls += 1
        if self.calls == 4:
            self.patch.setattr(signals._request, "cause", "USR2")
            return await Slow().step(conversation)
        return await super().step(conversation)


def test_a_response_that_waits_for_its_answer_at_a_stop_is_continued(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = token_ids(by_number(list(make_generator().generate(GROUPS, SAMPLING, seed=3))))
    generation = make_generator(AsksToStop(monkeypatch)).generate(GROUPS, SAMPLING, seed=3)
    first: dict[int, list[Sample]] = {}
    with pytest.raises(StopRequested):
        first.update((group.number, group.samples) for group in generation)
    left = by_number(generation.stop())
    monkeypatch.setattr(signals._request, "cause", None)
    numbers = sorted(left)
    groups = [replace(GROUPS[i], partial_samples=left[i]) for i in numbers]
    rest = make_generator().generate(groups, SAMPLING, seed=3)
    samples = first | {numbers[group.number]: group.samples for group in rest}
    assert token_ids(samples) == whole
