"""Every policy loss against its paper's formula, written out sequence by sequence in float64, on
random ragged data; values and gradients, in one piece and cut into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import get_args

import pytest
import torch
from torch import Tensor

from trainer.algorithms import (
    BY_COVARIANCE,
    POLICY_LOSSES,
    POLICY_SUMS,
    PolicyLossSettings,
    PolicyTokens,
    aggregate,
    select_by_covariance,
    token_weights,
)
from trainer.config.schema.actor import LossMode

SETTINGS = PolicyLossSettings(
    clip_ratio_low=0.2,
    clip_ratio_high=0.28,
    clip_ratio_c=1.5,
    clip_cov_ratio=0.1,
    clip_cov_lb=0.2,
    clip_cov_ub=2.0,
    kl_cov_ratio=0.1,
    ppo_kl_coef=0.7,
)
LOW, HIGH, DUAL = 0.2, 0.28, 1.5
LENGTHS = [7, 1, 12, 30, 3, 19, 8]
SEQUENCE = torch.repeat_interleave(torch.arange(7), torch.tensor(LENGTHS))
COUNT = sum(LENGTHS)


class Data:
    """Random tokens: new, old log-probs, and advantages equal within a sequence."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.new = -torch.rand(COUNT, generator=g) * 4
        self.old = self.new + torch.randn(COUNT, generator=g) * 0.5
        self.advantages = torch.randn(7, generator=g)[SEQUENCE]
        self.draws = torch.rand(COUNT, generator=g)


def selected_of(data: Data, mode: LossMode) -> Tensor | None:
    if mode not in BY_COVARIANCE:
        return None
    return select_by_covariance(
        mode,
        SETTINGS,
        old_log_probs=data.old,
        advantages=data.advantages,
        mask=torch.ones(COUNT, dtype=torch.bool),
        draws=data.draws,
    )


def clip(ratio: Tensor) -> Tensor:
    return ratio.clamp(1 - LOW, 1 + HIGH)


def ppo(new: Tensor, old: Tensor, a: Tensor) -> Tensor:
    """arXiv 1707.06347, equation 7: -min(r A, clip(r) A)."""
    ratio = torch.exp(new - old)
    return -torch.minimum(ratio * a, clip(ratio) * a)


def vanilla(new: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    """arXiv 1912.09729, equation 5: max(min(r A, clip(r) A), c A) where A < 0."""
    return torch.where(a < 0, torch.minimum(ppo(new, old, a), -DUAL * a), ppo(new, old, a))


def gspo(new: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    """arXiv 2507.18071, equations 5 and 7: s = (pi / pi_old)^(1/|y|), one loss per sequence."""
    s = torch.exp((new - old).mean())
    return (-torch.minimum(s * a[0], clip(s) * a[0])).expand(len(new))


def cispo(new: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    """arXiv 2506.13585, equation 4: -sg(clip(r)) A log pi."""
    return -clip(torch.exp(new - old)).detach() * a * new


def gpg(new: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    """arXiv 2504.02546, equation 7: -A log pi."""
    return -a * new


def clip_cov(new: Tensor, old: Tensor, a: Tensor, chosen: Tensor) -> Tensor:
    """arXiv 2505.22617, equation 12: the loss is 0 on the chosen tokens."""
    return ppo(new, old, a) * (~chosen)


def kl_cov(new: Tensor, old: Tensor, a: Tensor, chosen: Tensor) -> Tensor:
    """arXiv 2505.22617, equation 14: -r A, plus beta |log r| on the chosen tokens."""
    return -torch.exp(new - old) * a + 0.7 * (new - old).abs() * chosen


def geo_mean(new: Tensor, old: Tensor, a: Tensor, _: Tensor) -> Tensor:
    """arXiv 2507.20673, equation 4: -A (product of min(r^s, clip(r, e^-low, e^high)^s)^s)^(1/|y|),
    s the sign of A.
    """
    sign = torch.sign(a[0])
    ratio = torch.exp(new - old)
    held = ratio.clamp(torch.e**-LOW, torch.e**HIGH)
    product = torch.minimum(ratio**sign, held**sign).pow(sign).prod()
    return (-a[0] * product ** (1 / len(new))).expand(len(new))


PLAIN: dict[LossMode, Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]] = {
    "vanilla": vanilla,
    "gspo": gspo,
    "cispo": cispo,
    "gpg": gpg,
    "clip_cov": clip_cov,
    "kl_cov": kl_cov,
    "geo_mean": geo_mean,
}


def test_the_schema_the_losses_and_their_references_have_the_same_names() -> None:
    assert set(get_args(LossMode)) == set(POLICY_LOSSES) == set(PLAIN)


def step_weights() -> Tensor:
    return token_weights(
        "seq-mean-token-mean", torch.ones(COUNT, dtype=torch.bool), SEQUENCE, len(LENGTHS)
    )


def ours(
    data: Data, mode: LossMode, cuts: list[list[int]]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and sums of a step whose micro-batches hold the sequences of ``cuts``."""
    new = data.new.clone().requires_grad_()
    selected = selected_of(data, mode)
    total = torch.zeros(())
    sums = dict.fromkeys(POLICY_SUMS, 0.0)
    for sequences in cuts:
        at = torch.isin(SEQUENCE, torch.tensor(sequences)).nonzero().squeeze(1)
        tokens = PolicyTokens(
            log_probs=new[at],
            old_log_probs=data.old[at],
            advantages=data.advantages[at],
            sequence=SEQUENCE[at] * 3 + 2,
            selected=None if selected is None else selected[at],
        )
        out = POLICY_LOSSES[mode](tokens, SETTINGS)
        assert set(out.sums) == set(POLICY_SUMS)
        total = total + aggregate(out.losses, step_weights()[at])
        for name, value in out.sums.items():
            sums[name] += float(value)
    total.backward()
    assert new.grad is not None
    return total.detach(), new.grad, sums


def plainly(data: Data, mode: LossMode) -> tuple[Tensor, Tensor]:
    new = data.new.double().requires_grad_()
    selected = selected_of(data, mode)
    chosen = torch.zeros(COUNT, dtype=torch.bool) if selected is None else selected
    losses = []
    for i in range(len(LENGTHS)):
        at = torch.eq(SEQUENCE, i)
        a = data.advantages[at].double()
        losses.append(PLAIN[mode](new[at], data.old[at].double(), a, chosen[at]).mean())
    total = torch.stack(losses).mean()
    total.backward()
    assert new.grad is not None
    return total.detach(), new.grad


@pytest.mark.parametrize("mode", get_args(LossMode))
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_loss_and_gradient_are_those_of_the_paper_however_the_step_is_cut(
    mode: LossMode, seed: int
) -> None:
    data = Data(seed)
    loss, gradient = plainly(data, mode)
    whole = None
    for cuts in ([[0, 1, 2, 3, 4, 5, 6]], [[3], [5, 0], [], [1, 2, 6], [4]]):
        made, made_gradient, sums = ours(data, mode, cuts)
        assert made.item() == pytest.approx(loss.item(), abs=1e-6)
        torch.testing.assert_close(made_gradient.double(), gradient, atol=1e-6, rtol=0)
        whole = whole or sums
        assert sums == pytest.approx(whole, rel=1e-9)
    assert whole is not None and whole["tokens"] == COUNT


def test_sums_say_how_many_tokens_a_loss_treated_apart() -> None:
    data = Data(0)
    ratio = torch.exp(data.new - data.old)
    a = data.advantages
    sums = {mode: ours(data, mode, [list(range(7))])[2] for mode in get_args(LossMode)}
    outside = int(((ratio < 1 - LOW) | (ratio > 1 + HIGH)).sum())
    active = int((((a > 0) & (ratio > 1 + HIGH)) | ((a < 0) & (ratio < 1 - LOW))).sum())
    assert sums["vanilla"]["pg_clipfrac"] == sums["clip_cov"]["pg_clipfrac"] == active > 0
    assert sums["vanilla"]["pg_clipfrac_lower"] == int(((a < 0) & (ratio > DUAL)).sum()) > 0
    assert sums["cispo"]["pg_clipfrac"] == outside > 0
    assert 0 < sums["geo_mean"]["pg_clipfrac"] < COUNT
    assert sums["gpg"]["pg_clipfrac"] == sums["kl_cov"]["pg_clipfrac"] == 0
    assert sums["clip_cov"]["cov_selected"] == sums["kl_cov"]["cov_selected"] == int(0.1 * COUNT)
    assert sums["vanilla"]["ppo_kl"] == pytest.approx((data.old - data.new).sum().item(), rel=1e-5)


def covariances(data: Data, mask: Tensor) -> list[tuple[float, int]]:
    """arXiv 2505.22617, equation 10, of each trained token."""
    at = mask.nonzero().squeeze(1).tolist()
    mean_log_prob = sum(float(data.old[t]) for t in at) / len(at)
    mean_advantage = sum(float(data.advantages[t]) for t in at) / len(at)
    return [
        ((float(data.old[t]) - mean_log_prob) * (float(data.advantages[t]) - mean_advantage), t)
        for t in at
    ]


def test_kl_cov_selects_the_largest_covariances_of_the_trained_tokens() -> None:
    data = Data(3)
    mask = torch.arange(COUNT) % 4 != 0
    made = select_by_covariance(
        "kl_cov", SETTINGS, old_log_probs=data.old, advantages=data.advantages, mask=mask
    )
    ranked = sorted(covariances(data, mask), reverse=True)[: int(0.1 * int(mask.sum()))]
    assert sorted(made.nonzero().squeeze(1).tolist()) == sorted(t for _, t in ranked)


def test_clip_cov_draws_from_the_tokens_between_its_bounds() -> None:
    data = Data(4)
    mask = torch.arange(COUNT) % 4 != 0
    between = {t for c, t in covariances(data, mask) if 0.2 < c < 2.0}
    counts = torch.zeros(COUNT)
    for seed in range(300):
        draws = torch.rand(COUNT, generator=torch.Generator().manual_seed(seed))
        made = select_by_covariance(
            "clip_cov",
            SETTINGS,
            old_log_probs=data.old,
            advantages=data.advantages,
            mask=mask,
            draws=draws,
        )
        assert int(made.sum()) == int(0.1 * int(mask.sum()))
        counts += made
    assert set(counts.nonzero().squeeze(1).tolist()) == between
    expected = 300 * int(0.1 * int(mask.sum())) / len(between)
    assert counts[counts > 0].min() > 0.6 * expected and counts.max() < 1.4 * expected


def test_a_selection_of_few_tokens_and_of_none() -> None:
    data = Data(5)
    for mode in BY_COVARIANCE:
        for mask in (torch.arange(COUNT) == 9, torch.zeros(COUNT, dtype=torch.bool)):
            made = select_by_covariance(
                mode,
                PolicyLossSettings(clip_cov_lb=-100, clip_cov_ub=100),
                old_log_probs=data.old,
                advantages=data.advantages,
                mask=mask,
                draws=data.draws,
            )
            assert torch.equal(made, mask)


def test_vanilla_gradient_stops_where_the_clip_is_active() -> None:
    new = torch.log(torch.tensor([1.5, 0.5, 1.5, 9.0])).requires_grad_()
    tokens = PolicyTokens(
        log_probs=new,
        old_log_probs=torch.zeros(4),
        advantages=torch.tensor([1.0, 1.0, -1.0, -1.0]),
        sequence=torch.arange(4),
    )
    POLICY_LOSSES["vanilla"](tokens, PolicyLossSettings()).losses.sum().backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, torch.tensor([0.0, -0.5, 1.5, 0.0]))


@pytest.mark.parametrize("mode", get_args(LossMode))
def test_on_policy_gradient_is_reinforce(mode: LossMode) -> None:
    data = Data(6)
    new = data.new.clone().requires_grad_()
    tokens = PolicyTokens(
        log_probs=new,
        old_log_probs=data.new,
        advantages=data.advantages,
        sequence=SEQUENCE,
        selected=torch.zeros(COUNT, dtype=torch.bool),
    )
    aggregate(POLICY_LOSSES[mode](tokens, SETTINGS).losses, step_weights()).backward()
    assert new.grad is not None
    torch.testing.assert_close(new.grad, -data.advantages * step_weights())


@pytest.mark.parametrize("mode", get_args(LossMode))
def test_absurd_ratios_stay_finite(mode: LossMode) -> None:
    new = torch.tensor([-200.0, 0.0, 0.0]).requires_grad_()
    tokens = PolicyTokens(
        log_probs=new,
        old_log_probs=torch.tensor([0.0, -200.0, -200.0]),
        advantages=torch.tensor([1.0, 1.0, -1.0]),
        sequence=torch.arange(3),
        selected=torch.ones(3, dtype=torch.bool),
    )
    out = POLICY_LOSSES[mode](tokens, SETTINGS)
    out.losses.sum().backward()
    assert out.losses.isfinite().all()
    assert new.grad is not None and new.grad.isfinite().all()
