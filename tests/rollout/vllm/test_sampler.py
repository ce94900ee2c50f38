"""Rows of one batch draw each in its own way, with the random number of their position."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.rollout import Sampling
from trainer.rollout.hf.sampling import choose, uniforms
from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.engine.sampler import ARGUMENT, Rows, draw, extra_arguments

WARM = Sampling(max_response_length=9, temperature=0.8, top_k=20, top_p=0.9)
GREEDY = Sampling(max_response_length=9, temperature=0)


def argument(sample_id: int, position: int, how: Sampling) -> dict[str, Any]:
    request = Request(
        key="k",
        number=0,
        place=0,
        prompt_ids=[1],
        max_tokens=9,
        seed=-3,
        step=4,
        sample_id=sample_id,
        position=position,
    )
    plain: dict[str, Any] = json.loads(json.dumps(extra_arguments(request, how)))  # it may travel
    return plain[ARGUMENT]


def draw_told(logits: Tensor, told: list[tuple[dict[str, Any], int]]) -> tuple[Tensor, Tensor]:
    return draw(
        logits, Rows([argument for argument, _ in told]), np.array([drawn for _, drawn in told])
    )


def test_a_mixed_batch_draws_row_by_row() -> None:
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0)) * 3
    told = [
        (argument(7, 2, WARM), 60),
        (argument(8, 0, GREEDY), 3),
        (argument(7, 0, WARM), 62),
        (argument(9, 0, WARM), 0),
    ]
    told.append((argument(7, 0, Sampling(max_response_length=9)), 62))
    tokens, log_probs = draw_told(logits.clone(), told)
    for row, (one, drawn) in enumerate(told):
        how = Sampling(**one["how"])
        position = one["position"] + drawn
        u = uniforms(-3, 4, [one["sample"]], position // 4 * 4, 4)[:, position % 4]
        token, log_prob = choose(logits[row : row + 1].clone(), None if how.greedy else u, how)
        assert int(tokens[row]) == int(token) and abs(float(log_probs[row] - log_prob)) < 1e-6
    again, _ = draw_told(logits.clone(), told)
    assert again.tolist() == tokens.tolist()


def test_random_numbers_follow_the_position_whatever_was_asked_before() -> None:
    one = argument(5, 3, WARM)
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(1)).expand(200, -1)
    rows = Rows([one])
    row_by_row = [int(draw(logits[:1].clone(), rows, np.array([k]))[0]) for k in range(200)]
    anew = [
        int(draw_told(logits[:1].clone(), [(one, k)])[0]) for k in range(200)
    ]  # the company changed
    at_once = draw_told(logits.clone(), [(argument(5, 3 + k, WARM), 0) for k in range(200)])[
        0
    ].tolist()
    assert row_by_row == anew == at_once and len(set(at_once)) > 5
