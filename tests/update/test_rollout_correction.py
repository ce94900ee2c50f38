"""The correction in the loss of a step: weights on the policy loss, rejections without a change of
scale.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from tests.config.helpers import minimal_settings, put
from trainer.config import load
from trainer.config.checks.problems import SettingsError
from trainer.data import Batch
from trainer.run.rollout_correction import attach_rollout_correction
from trainer.update.losses import make_objective

KEY = "algorithm.rollout_correction"


def settings_with(*overrides: str) -> dict[str, Any]:
    settings = minimal_settings()
    for override in overrides:
        key, _, value = override.partition("=")
        parsed = yaml.safe_load(value)
        put(settings, key, value if isinstance(parsed, str) or "_" in value else parsed)
    return settings


def batch_of() -> Batch:
    mask = torch.tensor([False, True, True, False, True, True, True])
    old = torch.tensor([0.0, -1.0, -2.0, 0.0, -0.5, -1.5, -1.0])
    rollout = torch.tensor([0.0, -1.2, -1.0, 0.0, -0.6, -4.0, -1.0])
    return Batch(
        torch.tensor([0, 3, 7]),
        {
            "input_ids": torch.arange(7),
            "loss_mask": mask,
            "old_log_probs": old,
            "rollout_log_probs": rollout,
            "advantages": torch.tensor([0.0, 1.0, 1.0, 0.0, -1.0, -1.0, -1.0]),
        },
        {"ids": torch.arange(2)},
    )


def loss_of(*overrides: str) -> tuple[float, Batch, dict[str, float]]:
    config = load(settings_with(*overrides))
    batch = batch_of()
    metrics = attach_rollout_correction(config.algorithm.rollout_correction, batch)
    objective = make_objective(config)
    objective.attach_weights(batch)
    targets = batch.columns["loss_mask"].nonzero().squeeze(-1)
    now = (batch.columns["old_log_probs"][targets] + 0.1).requires_grad_()
    stats: Any = SimpleNamespace(log_probs=now, entropy=torch.zeros(len(targets)))
    packed: Any = SimpleNamespace(targets=targets)
    loss, _ = objective(batch, packed, stats)
    return float(loss.detach()), batch, metrics


def test_weights_multiply_the_policy_loss_and_rejection_keeps_the_denominator() -> None:
    ratio = 1.1051709180756477  # exp(0.1), within the clip
    advantages = [1.0, 1.0, -1.0, -1.0, -1.0]
    r = [1.2214027581601699, 0.36787944117144233, 1.1051709180756477, 12.182493960703473, 1.0]
    plain, _, _ = loss_of()
    assert plain == pytest.approx(sum(-a * ratio for a in advantages) / 5, abs=1e-6)
    weighted, _, metrics = loss_of(f"{KEY}.rollout_is=token")
    expected = sum(-a * ratio * min(w, 2.0) for a, w in zip(advantages, r, strict=True)) / 5
    assert weighted == pytest.approx(expected, abs=1e-6)
    assert metrics["rollout_corr/rollout_is_max"] == 2.0
    kept = [0.5 <= 1 / x <= 5.0 for x in r]
    rejected, batch, metrics = loss_of(
        f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=0.5_5.0"
    )
    expected = sum(-a * ratio for a, k in zip(advantages, kept, strict=True) if k) / 5
    assert rejected == pytest.approx(expected, abs=1e-6)
    assert batch.columns["weights"][batch.columns["loss_mask"]].tolist() == pytest.approx(
        [0.2 * k for k in kept]
    )
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ([f"{KEY}.rollout_rs=token_k1"], "rollout_rs_threshold=None gives none"),
        ([f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=5.0_0.5"], "gives none"),
        ([f"{KEY}.rollout_rs=seq_max_k3", f"{KEY}.rollout_rs_threshold=0.5_5.0"], "gives none"),
        ([f"{KEY}.rollout_rs=token_k1", f"{KEY}.rollout_rs_threshold=0.55"], "gives none"),
        ([f"{KEY}.bypass_mode=true", f"{KEY}.rollout_is=token"], "compare them with themselves"),
        (["actor_rollout_ref.rollout.top_p=0.9"], "from a part of the distribution"),
        (["actor_rollout_ref.rollout.top_k=50"], "from a part of the distribution"),
    ],
)
def test_what_contradicts_itself_is_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(SettingsError, match=message):
        load(settings_with(*overrides))


@pytest.mark.parametrize(
    ("typed", "taken"),
    [("geometric", "seq_mean_k1"), ("token", "token_k1"), ("sequence", "seq_sum_k1")],
)
def test_names_of_older_versions_of_verl(typed: str, taken: str) -> None:
    config = load(settings_with(f"{KEY}.rollout_rs={typed}", f"{KEY}.rollout_rs_threshold=2.0"))
    assert config.algorithm.rollout_correction.rollout_rs == taken
