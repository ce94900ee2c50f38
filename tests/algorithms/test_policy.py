"""Losses, KL and schedules against the formulas written out, one token at a time."""

from __future__ import annotations

import math

import pytest
import torch

from trainer.algorithms import (
    AdaptiveKl,
    add_terms,
    is_clamped,
    kl_estimate,
    kl_loss,
    learning_rate,
    make_kl_controller,
    sft_loss,
    value_loss,
)

G = torch.Generator().manual_seed(0)
NEW = -torch.rand(60, generator=G) * 4
OLD = NEW + torch.randn(60, generator=G) * 0.8
ADV = torch.randn(60, generator=G)


def test_sft_and_value_losses() -> None:
    assert torch.equal(sft_loss(NEW).losses, -NEW)
    assert sft_loss(NEW).sums["nll"].item() == pytest.approx(-NEW.double().sum().item())
    made = value_loss(torch.tensor([2.0, 0.1]), torch.tensor([0.0, 0.0]), torch.tensor([2.0, 1.0]))
    torch.testing.assert_close(made.losses, 0.5 * torch.tensor([1.5**2, 0.9**2]))
    assert made.sums["vf_clipfrac"] == 1


def test_terms_share_one_normaliser_and_a_zero_coefficient_leaves_one_out() -> None:
    made = add_terms(ADV, entropy=NEW, entropy_coeff=0.5, kl=OLD, kl_loss_coef=0.25)
    torch.testing.assert_close(made, ADV - 0.5 * NEW + 0.25 * OLD)
    assert torch.equal(add_terms(ADV, kl=torch.full((60,), torch.nan), kl_loss_coef=0.0), ADV)


def test_kl_estimators() -> None:
    d = NEW - OLD
    for names, expected in (
        (("k1", "kl"), d),
        (("k2", "mse"), d**2 / 2),
        (("k3", "low_var_kl"), torch.exp(-d) - 1 + d),
        (("abs",), d.abs()),
    ):
        for name in names:
            torch.testing.assert_close(kl_estimate(NEW, OLD, name), expected, atol=1e-5, rtol=1e-5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="no KL estimator 'k4'"):
        kl_estimate(NEW, OLD, "k4")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1", "kl", "k3", "low_var_kl", "abs"])
def test_a_plus_keeps_the_value_and_takes_the_gradient_of_k2(kind: str) -> None:
    new = NEW.clone().requires_grad_()
    made = kl_loss(new, OLD, f"{kind}+")  # type: ignore[arg-type]
    made.sum().backward()
    assert torch.equal(made.detach(), kl_estimate(NEW, OLD, kind))  # type: ignore[arg-type]
    torch.testing.assert_close(new.grad, NEW - OLD)


def test_the_gradient_of_k3_plus_is_that_of_the_kl_and_that_of_k3_is_not() -> None:
    """Exactly, over a vocabulary of 6: the mean under the policy of the estimate's gradient."""
    logits, reference = torch.randn(2, 6, generator=torch.Generator().manual_seed(5)).double()
    q = reference.log_softmax(-1)
    exact = logits.clone().requires_grad_()
    p = exact.log_softmax(-1)
    (p.exp() * (p - q)).sum().backward()
    gradients = {}
    for kind in ("k3", "k3+"):
        of = logits.clone().requires_grad_()
        p = of.log_softmax(-1)
        (p.detach().exp() * kl_loss(p, q, kind)).sum().backward()  # type: ignore[arg-type]
        gradients[kind] = of.grad
    assert exact.grad is not None
    torch.testing.assert_close(gradients["k3+"], exact.grad, atol=1e-6, rtol=0)
    assert (gradients["k3"] - exact.grad).abs().max() > 0.05


def test_clamped_estimates_are_those_without_gradient() -> None:
    new = torch.tensor([0.0, -2.0, -2.5, -25.0, 25.0, -8.0]).requires_grad_()
    for kind in ("k1", "k3", "k3+", "low_var_kl"):
        clamped = is_clamped(new, torch.zeros(6), kind)  # type: ignore[arg-type]
        (gradient,) = torch.autograd.grad(
            kl_estimate(new, torch.zeros(6), kind.removesuffix("+")).sum(),  # type: ignore[arg-type]
            new,
        )
        assert clamped[1:].tolist() == gradient[1:].eq(0).tolist(), kind  # at 0 k3 is least
        assert not clamped[0] and clamped[3]


def test_k1_and_k3_estimate_the_true_kl() -> None:
    p, q = torch.randn(2, 6, generator=torch.Generator().manual_seed(5)).log_softmax(-1)
    true = (p.exp() * (p - q)).sum()
    for kind in ("k1", "k3"):
        torch.testing.assert_close((p.exp() * kl_estimate(p, q, kind)).sum(), true)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "abs"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kl_is_finite_and_not_negative_where_it_must_be(kind: str, dtype: torch.dtype) -> None:
    new = torch.tensor([0.0, -300.0, -7.97, -8.0], dtype=dtype).requires_grad_()
    ref = torch.tensor([-300.0, 0.0, -8.0, -8.0], dtype=dtype)
    made = kl_estimate(new, ref, kind)  # type: ignore[arg-type]
    made.sum().backward()
    assert made.dtype == torch.float32
    assert made.isfinite().all()
    assert new.grad is not None and new.grad.isfinite().all()
    assert kind == "k1" or made.min() >= 0


def test_adaptive_controller() -> None:
    kl = make_kl_controller("kl_controller", kl_coef=0.1, target_kl=0.05, horizon=10_000)
    kl.update(0.055, 1000)  # 10 % over
    assert kl.coef == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    kl.update(5.0, 1000)  # held at +20 %
    assert kl.coef == pytest.approx(0.101 * 1.02)
    before = kl.coef
    kl.update(0.0, 1000)
    assert kl.coef == pytest.approx(before * 0.98)
    kl.update(float("nan"), 1000)
    assert kl.coef == pytest.approx(before * 0.98)
    resumed = AdaptiveKl(0.1, 0.05, 10_000)
    resumed.load_state_dict(kl.state_dict())
    assert resumed.coef == kl.coef
    fixed = make_kl_controller("fixed", kl_coef=0.1, target_kl=0.05, horizon=10)
    fixed.update(9.0, 100)
    assert fixed.coef == 0.1
    with pytest.raises(ValueError, match="neither fixed nor adaptive"):
        make_kl_controller("other", kl_coef=0.1, target_kl=0.05, horizon=10)


def test_learning_rates() -> None:
    def rates(kind: str, warmup: int = 3, total: int = 11, low: float = 0.1) -> list[float]:
        return [
            learning_rate(
                s, lr=2.0, kind=kind, warmup_steps=warmup, total_steps=total, min_lr_ratio=low
            )
            for s in range(total + 2)
        ]

    assert rates("constant") == pytest.approx([0.5, 1.0, 1.5] + [2.0] * 10)
    linear, cosine = rates("linear"), rates("cosine")
    assert linear[3] == cosine[3] == 2.0
    # Step 10 is the last of 11.
    assert linear[5] == pytest.approx(2.0 - 1.8 * 2 / 8)
    assert linear[10] == pytest.approx(0.2 + 1.8 / 8)
    assert cosine[5] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 2 / 8)))
    assert cosine[10] == pytest.approx(0.2 + 1.8 * 0.5 * (1 + math.cos(math.pi * 7 / 8)))
    assert linear[11:] == pytest.approx([0.2] * 2) and cosine[11:] == pytest.approx([0.2] * 2)
    assert min(rates("linear", low=0)[:11] + rates("cosine", low=0)[:11]) > 0.05
    assert rates("linear", warmup=0, total=1)[0] == 2.0
    assert rates("cosine", warmup=1, total=1)[0] == 1.0
    with pytest.raises(ValueError, match="'step' is none of constant, linear, cosine"):
        rates("step")


@pytest.mark.parametrize("kind", ["linear", "cosine"])
@pytest.mark.parametrize("low", [0.0, 0.1])
def test_schedules_fall_as_those_of_transformers(kind: str, low: float) -> None:
    """Without warm-up, whose first step has rate 0 there, every step has the same rate."""
    from transformers.optimization import (
        get_cosine_with_min_lr_schedule_with_warmup,
        get_linear_schedule_with_warmup,
    )

    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    if kind == "linear":
        scheduler = get_linear_schedule_with_warmup(optimizer, 0, 7)
    else:
        scheduler = get_cosine_with_min_lr_schedule_with_warmup(optimizer, 0, 7, min_lr_rate=low)
    for step in range(7):
        expected = scheduler.get_last_lr()[0]
        if kind == "linear":
            expected = 2.0 * low + (1 - low) * expected
        rate = learning_rate(
            step, lr=2.0, kind=kind, warmup_steps=0, total_steps=7, min_lr_ratio=low
        )
        assert rate == pytest.approx(expected) and rate > 0
        optimizer.step()
        scheduler.step()
