"""Every estimator that the settings accept, as a step calls it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
import torch

from tests.config.helpers import minimal_settings
from trainer.algorithms import compute_advantages, make_kl_controller, sequence_index
from trainer.config import load
from trainer.config.schema.algorithm import AdvEstimator
from trainer.data import Batch
from trainer.run.attach_advantages import attach_advantages

ESTIMATORS = get_args(AdvEstimator)


def make_batch() -> Batch:
    """Four responses to two prompts, with a token between trained ones."""
    g = torch.Generator().manual_seed(1)
    lengths = torch.tensor([4, 6, 3, 5])
    n = int(lengths.sum())
    mask = torch.rand(n, generator=g) < 0.7
    return Batch(
        torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)]),
        {
            "loss_mask": mask,
            "old_log_probs": -torch.rand(n, generator=g),
            "ref_log_probs": -torch.rand(n, generator=g),
            "values": torch.rand(n, generator=g),
        },
        {
            "rewards": torch.tensor([1.0, 0.0, 0.5, 0.25]),
            "baselines": torch.tensor([0.5, 0.5, 1.0, 1.0]),
            "groups": torch.tensor([0, 0, 1, 1]),
        },
    )


def context(**changes: object) -> Any:
    controller = make_kl_controller("fixed", kl_coef=0.1, target_kl=0.1, horizon=10)
    config = load(minimal_settings(**{"trainer.mode": "rl"}, **changes))
    critic = SimpleNamespace() if config.uses_critic else None
    return SimpleNamespace(config=config, kl_controller=controller, critic=critic)


@pytest.mark.parametrize("name", ESTIMATORS)
def test_every_estimator_gets_what_it_needs(name: str) -> None:
    batch = make_batch()
    keys = {"algorithm.adv_estimator": name, "algorithm.use_kl_in_reward": True}
    metrics = attach_advantages(context(**keys), batch)
    mask = batch.columns["loss_mask"]
    kl = mask * (batch.columns["old_log_probs"] - batch.columns["ref_log_probs"])
    expected = compute_advantages(
        name,  # type: ignore[arg-type]
        scores=batch.rows["rewards"],
        groups=batch.rows["groups"],
        values=batch.columns["values"],
        baselines=batch.rows["baselines"],
        mask=mask,
        sequence=sequence_index(batch.cu_seqlens),
        kl=kl,
        kl_coef=0.1,
    )
    assert torch.equal(batch.columns["advantages"], expected.advantages)
    assert expected.advantages[mask].abs().sum() > 0
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(kl[mask].mean().item())
    assert metrics["actor/reward_kl_clamped"] == 0
    if name == "gae":
        assert torch.equal(batch.columns["returns"], expected.returns)
        values = batch.columns["values"][mask]
        assert metrics["critic/values/mean"] == pytest.approx(values.mean().item())
    else:
        assert "returns" not in batch.columns and "critic/values/mean" not in metrics


def test_a_batch_whose_responses_are_all_masked_teaches_nothing() -> None:
    for name in ESTIMATORS:
        batch = make_batch()
        batch.columns["loss_mask"][:] = False
        keys = {"algorithm.adv_estimator": name, "algorithm.use_kl_in_reward": True}
        metrics = attach_advantages(context(**keys), batch)
        assert batch.columns["advantages"].eq(0).all()
        assert all(value == 0 for key, value in metrics.items() if "coeff" not in key)
