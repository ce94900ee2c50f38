"""The batch of a step's rollouts, and the metrics of what reward functions return."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.data.toy import Toy
from trainer.experience.batch import (
    check_failed_share,
    experience_metrics,
    mask_truncated,
    reward_metrics,
    to_batch,
)
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts
from trainer.parallel import exchange
from trainer.ranks.agreement import AgreedError
from trainer.rewards import Score
from trainer.rollout import Sample


def test_numbers_that_a_reward_returns_with_the_score_are_logged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scores = [
        Score(value=1.0, extra={"format": 1.0, "steps": 4.0}),
        Score(value=0.0, extra={"format": 0.0}),
    ]
    world: Any = SimpleNamespace(rank=0, size=1)
    assert reward_metrics(scores, world, rule=False) == {
        "reward/failed": 0.0,
        "reward/format": 0.5,
        "reward/steps": 4.0,
    }
    other_rank = json.dumps({"format": [1.0, 2.0], "other": [3.0, 1.0]}).encode()
    monkeypatch.setattr(exchange, "_all_gather_bytes", lambda own, world: [own, other_rank])
    assert reward_metrics(scores, world, rule=False, prefix="val_") == {
        "val_reward/failed": 0.0,
        "val_reward/format": 0.5,
        "val_reward/other": 3.0,
        "val_reward/steps": 4.0,
    }


def test_responses_that_the_rule_does_not_decide_are_counted() -> None:
    world: Any = SimpleNamespace(rank=0, size=1)
    scores = [
        Score(value=0.0, unjudged=True),
        Score(value=1.0),
        Score(value=0.0),
        Score(value=0.0),
    ]
    assert reward_metrics(scores, world, rule=True) == {"reward/unjudged": 0.25}
    assert reward_metrics([], world, rule=True) == {}


def test_too_many_failed_rewards_end_the_run_with_the_first_reason() -> None:
    world: Any = SimpleNamespace(
        rank=0, size=1, sum=lambda sums: sums, any=lambda code: code, gather=lambda value: [value]
    )
    scores = [Score(value=0.0, failed=reason) for reason in ("", "f raised", "f slept", "")]
    check_failed_share(scores, world, 0.5)
    check_failed_share([], world, 0.0)
    assert reward_metrics(scores, world, rule=False) == {"reward/failed": 0.5}
    with pytest.raises(AgreedError, match=r"2 of 4 .*max_failed_share=0.4. The first: f raised"):
        check_failed_share(scores, world, 0.4)


def test_only_the_models_tokens_are_trained_on() -> None:
    """Neither the prompt nor what a tool answered; a rank without prompts has empty columns."""
    data = Toy(2)
    requests = [PromptRequest(example=data[i], step=1, number=i) for i in range(2)]
    prompt = list(data[1].prompt_ids)
    sample = Sample(
        torch.tensor([7, 8, 9]),
        torch.tensor([-1.0, 0.0, -2.0]),
        "stop",
        version=4,
        response_mask=torch.tensor([True, False, True]),
    )
    rollouts = Rollouts(prompt_indices=[1], samples=[sample], scores=[Score(value=0.5)])
    batch = to_batch(rollouts, requests, 1)
    empty = [False] * len(prompt)
    assert batch.columns["input_ids"].tolist() == [*prompt, 7, 8, 9]
    assert batch.columns["loss_mask"].tolist() == [*empty, True, False, True]
    assert batch.columns["rollout_log_probs"].tolist()[-3:] == [-1.0, 0.0, -2.0]
    assert batch.rows["groups"].tolist() == [1] and batch.rows["versions"].tolist() == [4]
    nothing = to_batch(Rollouts(), requests, 1)
    assert len(nothing) == 0 and nothing.columns["loss_mask"].dtype == torch.bool


def responses(rewards: list[float], reasons: list[str]) -> Any:
    """A batch of two responses to each prompt, of 1, 2, 3 ... tokens."""
    samples: list[Any] = [
        Sample(torch.arange(k + 1), torch.zeros(k + 1), reason)  # type: ignore[arg-type]
        for k, reason in enumerate(reasons)
    ]
    rollouts = Rollouts(
        prompt_indices=[k // 2 for k in range(len(rewards))],
        samples=samples,
        scores=[Score(value=value) for value in rewards],
    )
    requests = [PromptRequest(example=Toy(9)[k]) for k in range(len(rewards) // 2)]
    return to_batch(rollouts, requests, 2)


def test_prompts_whose_responses_are_all_worth_the_same_are_counted() -> None:
    batch = responses([0.1, 0.1, 1.0, 0.0, 0.0, 0.0, 0.3, 0.2], ["stop"] * 8)
    assert experience_metrics(batch, 0)["critic/zero_spread_groups"] == 0.5


def test_no_token_of_a_truncated_response_is_trained_on() -> None:
    batch = responses([1.0, 0.0, 1.0, 0.0], ["stop", "length", "length", "stop"])
    before = batch.columns["loss_mask"].clone()
    mask_truncated(batch)
    bounds = batch.cu_seqlens.tolist()
    for k, kept in enumerate([True, False, False, True]):
        of = slice(bounds[k], bounds[k + 1])
        assert before[of].sum() == k + 1
        assert torch.equal(batch.columns["loss_mask"][of], before[of] & kept)
    assert batch.rows["rewards"].tolist() == [1.0, 0.0, 1.0, 0.0]
