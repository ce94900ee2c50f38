"""Several turns: who wrote which token, what it cost, and that nothing depends on where the
generation was stopped.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.models.support import make_model
from trainer.base.errors import UserError
from trainer.models import load_model
from trainer.rollout import Finished, Group, Sample, Sampling
from trainer.rollout.agent import AgentRunner, Conversation
from trainer.rollout.hf import HfEngine
from trainer.rollout.load_agent import load_agent
from trainer.rollout.template import ObservationTokens
from trainer.rollout.turns import Turns, turns_of

EOS = [1, 2, 3, 4, 5, 6]
"""So many of 64 tokens that a model of random weights ends its turns soon."""
GROUPS = [Group(prompt_ids=[9, 8 + i, 7], sample_ids=[2 * i, 2 * i + 1], step=1) for i in range(5)]
SAMPLING = Sampling(max_response_length=40)


class Fixed:
    """Tokens of an answer, whatever it says."""

    def ids(self, text: str) -> list[int]:
        return [20, 21, 22] if text else []


class Spelled:
    """A tokenizer that shows ids as they are."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, ids))


class Echo:
    """Answers each turn until the model has said 13, so that what it does depends on what was
    drawn.
    """

    async def step(self, conversation: Conversation) -> str | None:
        said = conversation.messages[-1]["content"].split()
        return None if "13" in said else f"you said {len(said)}"


@cache
def model() -> Any:
    return make_model("llama")


def turns(agent: Any = None, max_turns: int = 4, max_num_seqs: int = 64) -> Turns:
    return Turns(
        HfEngine(model(), eos_ids=EOS, max_num_seqs=max_num_seqs),
        AgentRunner(agent or Echo(), name="echo", timeout_s=100),
        tokenizer=Spelled(),
        observations=Fixed(),  # type: ignore[arg-type]
        eos_ids=EOS,
        max_turns=max_turns,
    )


def by_number(parts: list[Finished]) -> dict[int, list[Sample]]:
    return {part.number: part.samples for part in parts}


def text(samples: dict[int, list[Sample]]) -> dict[int, list[list[int]]]:
    return {i: [s.response_ids.tolist() for s in row] for i, row in samples.items()}


def test_only_what_the_model_wrote_is_its_own_and_its_log_probs_are_those_of_the_whole_response() -> (
    None
):
    found = by_number(list(turns().generate(GROUPS, SAMPLING, seed=3)))
    assert sorted(found) == list(range(5))
    several = 0
    for i, samples in found.items():
        for sample in samples:
            assert 0 < len(sample.response_ids) <= 40
            written = torch.ones(len(sample.response_ids), dtype=torch.bool)
            if sample.written is not None:
                several += 1
                written = sample.written
                ids = sample.response_ids[~written]
                assert ids.tolist() == [20, 21, 22] * (len(ids) // 3)
                assert bool((sample.log_probs[~written] == 0).all())
            assert turns_of(sample) <= 4
            whole = torch.tensor([[*GROUPS[i].prompt_ids, *sample.response_ids.tolist()]])
            with torch.no_grad():
                logits = model()(input_ids=whole, use_cache=False).logits[0, 2:-1]
            expected = logits.log_softmax(-1).gather(1, sample.response_ids[:, None])[:, 0]
            torch.testing.assert_close(
                sample.log_probs[written], expected[written], atol=1e-4, rtol=0
            )
    assert several >= 5


@pytest.mark.parametrize("after", [0, 1, 3])
def test_stopped_and_gone_on_with_is_the_same_as_in_one_go(after: int) -> None:
    whole = text(by_number(list(turns(max_num_seqs=4).generate(GROUPS, SAMPLING, seed=3))))
    generation = turns(max_num_seqs=4).generate(GROUPS, SAMPLING, seed=3)
    first: dict[int, list[Sample]] = {}
    parts = iter(generation)
    while len(first) < after:
        part = next(parts)
        first[part.number] = part.samples
    left = by_number(generation.stop())
    assert set(first) | set(left) == set(range(5)) and not set(first) & set(left)
    numbers = sorted(left)
    rest = turns().generate([replace(GROUPS[i], begun=left[i]) for i in numbers], SAMPLING, seed=3)
    found = first | {numbers[part.number]: part.samples for part in rest}
    assert text(found) == whole


def test_a_response_ends_when_no_turn_or_no_room_is_left() -> None:
    for sample in by_number(list(turns(max_turns=2).generate(GROUPS, SAMPLING, seed=3)))[0]:
        assert turns_of(sample) <= 2
    short = Sampling(max_response_length=5)
    for samples in by_number(list(turns().generate(GROUPS, short, seed=3))).values():
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


def test_an_agent_that_is_late_is_given_up_and_the_model_is_told() -> None:
    runner = AgentRunner(Slow(), name="Slow", timeout_s=0.05)
    assert runner.answer([TALK, TALK]) == ["error: no answer within 0.05 s"] * 2
    runner.close()


@pytest.mark.parametrize(
    ("agent", "says"), [(Raises(), "KeyError: 'price' (test_turns.py:"), (Wrong(), "returned int")]
)
def test_an_agent_that_fails_is_the_users_to_mend(agent: Any, says: str) -> None:
    with pytest.raises(UserError) as error:
        AgentRunner(agent, name="mine", timeout_s=100).answer([TALK])
    assert says in str(error.value) and "mine" in str(error.value)


def test_agents_are_found_by_name(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "class Search:\n    async def step(self, conversation): return None\nclass Sync:\n    def "
        "step(self): 1\n"
    )
    assert type(load_agent("calculator", None)).__name__ == "Calculator"
    assert type(load_agent("Search", str(file))).__name__ == "Search"
    for name, path, says in [
        ("calculater", None, "did you mean 'calculator'"),
        ("Serch", str(file), "did you mean 'Search'"),
        ("Sync", str(file), "has no 'async def step"),
        ("Search", str(tmp_path / "min.py"), "there is no file"),
    ]:
        with pytest.raises(UserError, match=r"actor_rollout_ref\.rollout\.agent") as error:
            load_agent(name, path)
        assert says in str(error.value)


@pytest.mark.parametrize("source", ["builtin:tiny"])
def test_an_answer_is_rendered_as_the_template_would(source: str) -> None:
    tokenizer = load_model(source, dtype=torch.float32, device=torch.device("cpu")).tokenizer
    ids = ObservationTokens(tokenizer, longest=8).ids("42")
    asked = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "2 + 2"}]
    whole = tokenizer.apply_chat_template(
        [*asked, {"role": "tool", "content": "42"}], add_generation_prompt=True, tokenize=False
    )
    prompt = tokenizer.apply_chat_template(asked[:1], add_generation_prompt=True, tokenize=False)
    joined = tokenizer.decode(
        [*tokenizer(prompt + "2 + 2")["input_ids"], tokenizer.eos_token_id, *ids]
    )
    assert joined.replace(" ", "") == whole.replace(" ", "")
    long = ObservationTokens(tokenizer, longest=4).ids("1 2 3 4 5 6 7 8 9 " * 9)
    assert len(long) <= len(ids) + 4


def test_a_template_that_cannot_take_turns_is_refused() -> None:
    tokenizer = load_model(
        "builtin:tiny", dtype=torch.float32, device=torch.device("cpu")
    ).tokenizer
    with pytest.raises(UserError, match="chat template knows no turn"):
        ObservationTokens(tokenizer, longest=8, template="{{ messages[0].content }}")
