"""What the critic is told to the user by, and what it refuses."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.helpers import minimal_settings
from trainer.base.errors import UserError
from trainer.config import load
from trainer.run.attach_advantages import value_metrics
from trainer.run.critic import load_critic
from trainer.run.policy_update import epoch_generator, prompt_order, scheduled_lr
from trainer.run.skipped_steps import SkippedSteps

GAE = {"trainer.mode": "rl", "algorithm.adv_estimator": "gae"}


def test_explained_variance_is_1_for_who_knows_and_0_for_who_knows_the_mean() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert value_metrics(returns, returns)["critic/vf_explained_var"] == 1.0
    mean = torch.full((4,), 2.0)
    assert value_metrics(mean, returns)["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-5)
    worse = value_metrics(-returns, returns)
    assert worse["critic/vf_explained_var"] == pytest.approx(-3.0, abs=1e-4)
    assert (worse["critic/values/min"], worse["critic/returns/mean"]) == (-5.0, 2.0)
    assert "critic/vf_explained_var" not in value_metrics(returns[:1], returns[:1])


def test_the_critic_has_a_learning_rate_of_its_own() -> None:
    config = load(
        minimal_settings(
            **GAE,
            **{
                "actor_rollout_ref.actor.optim.lr": 1.0,
                "critic.optim.lr": 2.0,
                "critic.optim.lr_warmup_steps": 1,
                "critic.optim.lr_scheduler_type": "linear",
                "critic.optim.min_lr_ratio": 0.5,
            },
        )
    )
    rates = [scheduled_lr(config.critic.optim, step, 5) for step in (1, 2, 6)]
    assert rates == [1.0, 2.0, 1.0]
    assert scheduled_lr(config.actor_rollout_ref.actor.optim, 6, 5) == 1.0


def test_a_critic_of_another_tokenizer_is_refused() -> None:
    config = load(minimal_settings(**GAE, **{"critic.model.path": "builtin:tiny"}))
    policy: Any = SimpleNamespace(tokenizer=SimpleNamespace(get_vocab=lambda: {"a": 0}))
    with pytest.raises(UserError, match=r"critic.model.path=builtin:tiny has another tokenizer"):
        load_critic(config, policy, torch.device("cpu"))


def test_prompts_are_shuffled_by_seed_step_and_epoch() -> None:
    batch: Any = SimpleNamespace(rows={"groups": torch.arange(20).repeat_interleave(2)})
    orders = [
        prompt_order(batch, epoch_generator(1, step, epoch), shuffle=True).tolist()
        for step, epoch in ((1, 0), (1, 0), (1, 1), (2, 0))
    ]
    assert orders[0] == orders[1] and len({tuple(order) for order in orders}) == 3
    assert all(sorted(order) == list(range(20)) for order in orders)
    still = prompt_order(batch, epoch_generator(1, 1, 0), shuffle=False)
    assert still.tolist() == list(range(20))


def test_a_critic_that_never_learns_ends_the_run_though_the_policy_does() -> None:
    steps = SkippedSteps(2)
    policy = {"actor/skipped_steps": 0.0, "actor/optimizer_steps": 4.0}
    for step in (1, 2):
        steps.observe(step, {**policy, "critic/skipped_steps": 2.0, "critic/optimizer_steps": 2.0})
    assert steps.reached_limit
    steps.observe(3, {**policy, "critic/skipped_steps": 1.0, "critic/optimizer_steps": 2.0})
    assert not steps.reached_limit
