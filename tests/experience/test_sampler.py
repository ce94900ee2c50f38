"""What a reward gets of a response: the model's turns apart, and those of its tool."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.helpers import minimal_settings
from tests.data.toy import CharTokenizer, Toy
from trainer.config import load
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts, Sampler
from trainer.rewards import OverlongPenalty, RewardRequest, Score, Scorer
from trainer.rewards.maths import maths
from trainer.rollout import FinishedGroup, Group, Sample, Sampling
from trainer.tracking import Timers


class Tokenizer(CharTokenizer):
    """Character 0 is the end token."""

    def decode(self, ids: list[int], skip_special_tokens: bool = False) -> str:
        return "".join(chr(i) for i in ids if i or not skip_special_tokens)

    def batch_decode(self, rows: list[list[int]], skip_special_tokens: bool = False) -> list[str]:
        return [self.decode(row, skip_special_tokens) for row in rows]


def sample(*turns: str) -> Sample:
    """A response whose turns are the model's and the tool's in turns."""
    ids = [ord(c) for turn in turns for c in turn]
    mask = [k % 2 == 0 for k, turn in enumerate(turns) for _ in turn]
    return Sample(
        torch.tensor(ids),
        torch.zeros(len(ids)),
        "stop",
        response_mask=torch.tensor(mask) if len(turns) > 1 else None,
    )


def scored(samples: list[Sample]) -> tuple[list[RewardRequest], list[str]]:
    """The requests that the scorer gets for ``samples``, and the texts that are logged."""
    requests, rollouts = rolled_out(samples)
    return requests, rollouts.texts


def rolled_out(
    samples: list[Sample], overlong_penalty: OverlongPenalty | None = None
) -> tuple[list[RewardRequest], Rollouts]:
    """The requests that the scorer gets for ``samples``, and what comes of them."""
    requests: list[RewardRequest] = []
    generation = SimpleNamespace(
        generate=lambda *_, **__: iter([FinishedGroup(number=0, samples=samples)])
    )
    scoring = SimpleNamespace(
        submit=requests.append, results=lambda: [Score(value=0.0)] * len(samples)
    )
    sampler = Sampler(
        generator=generation,
        sampling=Sampling(max_response_length=9),
        n=len(samples),
        scorer=SimpleNamespace(begin_round=lambda: scoring),  # type: ignore[arg-type]
        tokenizer=Tokenizer(),
        seed=0,
        overlong_penalty=overlong_penalty,
    )
    rollouts = sampler.roll_out({0: PromptRequest(example=Toy(1)[0], number=0)}, Timers())
    return requests, rollouts


def test_a_long_response_is_penalised_by_its_tokens() -> None:
    """DAPO's equation 13: 9 tokens at most, over the last 4 of them linear to -1."""
    samples = [sample("12345"), sample("1234567"), sample("123456789")]
    penalty = OverlongPenalty(max_length=9, buffer=4, factor=1.0)
    rollouts = rolled_out(samples, overlong_penalty=penalty)[1]
    assert [score.value for score in rollouts.scores] == [0.0, -0.5, -1.0]
    assert [s.value for s in rolled_out(samples)[1].scores] == [0.0, 0.0, 0.0]


@pytest.mark.parametrize("validation", [False, True])
def test_only_training_penalises_long_responses(validation: bool) -> None:
    settings: dict[str, Any] = {
        "reward_model.overlong_buffer.enable": True,
        "reward_model.overlong_buffer.len": 7,
    }
    config = load(minimal_settings(**settings))
    anything: Any = None
    sampler = Sampler.from_config(config, anything, anything, anything, validation=validation)
    longest = config.data.max_response_length
    expected = OverlongPenalty(max_length=longest, buffer=7, factor=1.0)
    assert sampler.overlong_penalty == (None if validation else expected)


def test_turns_of_the_model_are_lines_of_their_own() -> None:
    requests, texts = scored([sample("1\0", "<tool>2+3", "5\0"), sample("#### 15\0")])
    assert texts == [r.solution_text for r in requests] == ["1\n5", "#### 15"]
    assert requests[0].extra_info["turns"] == [
        {"role": "assistant", "content": "1"},
        {"role": "tool", "content": "<tool>2+3"},
        {"role": "assistant", "content": "5"},
    ]
    assert list(requests[0].turns) == requests[0].extra_info["turns"]
    assert "turns" not in requests[1].extra_info
    assert requests[1].turns == ({"role": "assistant", "content": "#### 15"},)
    assert [(r.response_length, r.finish_reason) for r in requests] == [(13, "stop"), (8, "stop")]
    assert maths("d", texts[0], "15") == 0


def test_the_answer_of_the_last_turn_counts() -> None:
    requests, _ = scored([sample("#### 1\0", "t", "#### 5\0"), sample("#### 1\0", "t", "5")])
    with Scorer() as scorer:
        for request, truth in zip(requests, ("5", "1"), strict=True):
            correct = RewardRequest(
                data_source="d", solution_text=request.solution_text, ground_truth=truth
            )
            assert scorer.score([correct])[0].value == 1


def test_remax_scores_a_greedy_response_to_each_prompt_beside_the_others() -> None:
    """Sampled responses say which token came; the greedy one is drawn without sampling, alone."""
    asked: list[tuple[int, bool]] = []

    def generate(groups: Sequence[Group], sampling: Sampling, **_: Any) -> Iterator[FinishedGroup]:
        for number, group in enumerate(groups):
            asked.append((len(group.sample_ids), sampling.do_sample))
            text = "sampled" if sampling.do_sample else f"greedy{number}"
            samples = [sample(text) for _ in group.sample_ids]
            yield FinishedGroup(number=number, samples=samples)

    def begin_round() -> Any:
        texts: list[str] = []
        values = {"sampled": 0.5, "greedy0": 0.25, "greedy1": -1.0}
        return SimpleNamespace(
            submit=lambda request: texts.append(request.solution_text),
            results=lambda: [Score(value=values[text]) for text in texts],
        )

    generator: Any = SimpleNamespace(generate=generate)
    scorer: Any = SimpleNamespace(begin_round=begin_round)
    settings = minimal_settings(algorithm__adv_estimator="remax", actor_rollout_ref__rollout__n=3)
    sampler = Sampler.from_config(load(settings), generator, scorer, Tokenizer())
    begun = PromptRequest(example=Toy(1)[0], step=1, partial_samples=(sample("sam"),) * 3)
    rollouts = sampler.roll_out({4: begun, 2: replace(begun, number=1)}, Timers())
    assert asked == [(3, True)] * 2 + [(1, False)] * 2
    assert rollouts.prompt_indices == [2] * 3 + [4] * 3
    assert [score.value for score in rollouts.scores] == [0.5] * 6
    assert rollouts.baselines == [0.25] * 3 + [-1.0] * 3  # prompt 2 is the first of the greedy ones
    validation = Sampler.from_config(
        load(settings), generator, scorer, Tokenizer(), validation=True
    )
    assert validation.roll_out({0: begun}, Timers()).baselines is None
