"""Each row of a batch is sampled with its own settings and the random number of its position."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trainer.rollout import Sampling
from trainer.rollout.hf.sampling import sample_tokens, uniforms
from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.engine.sampler import (
    EXTRA_ARGUMENT,
    BatchRows,
    extra_arguments,
    sample,
)

WARM = Sampling(max_response_length=9, temperature=0.8, top_k=20, top_p=0.9)
GREEDY = Sampling(max_response_length=9, temperature=0)


def argument(sample_id: int, position: int, sampling: Sampling) -> dict[str, Any]:
    request = Request(
        request_id="k",
        group_number=0,
        sample_number=0,
        prompt_ids=[1],
        max_tokens=9,
        seed=-3,
        step=4,
        sample_id=sample_id,
        position=position,
    )
    plain: dict[str, Any] = json.loads(json.dumps(extra_arguments(request, sampling)))  # as if sent
    return plain[EXTRA_ARGUMENT]


def sample_rows(logits: Tensor, rows: list[tuple[dict[str, Any], int]]) -> tuple[Tensor, Tensor]:
    batch = BatchRows([argument for argument, _ in rows])
    return sample(logits, batch, np.array([num_drawn for _, num_drawn in rows]))


def test_a_mixed_batch_is_sampled_row_by_row() -> None:
    logits = torch.randn(5, 97, generator=torch.Generator().manual_seed(0)) * 3
    rows = [
        (argument(7, 2, WARM), 60),
        (argument(8, 0, GREEDY), 3),
        (argument(7, 0, WARM), 62),
        (argument(9, 0, WARM), 0),
    ]
    rows.append((argument(7, 0, Sampling(max_response_length=9)), 62))
    tokens, log_probs = sample_rows(logits.clone(), rows)
    for row, (one, num_drawn) in enumerate(rows):
        sampling = Sampling(**one["sampling"])
        position = one["position"] + num_drawn
        u = uniforms(-3, 4, [one["sample"]], position // 4 * 4, 4)[:, position % 4]
        token, log_prob = sample_tokens(
            logits[row : row + 1].clone(), None if sampling.greedy else u, sampling
        )
        assert int(tokens[row]) == int(token) and abs(float(log_probs[row] - log_prob)) < 1e-6
    again, _ = sample_rows(logits.clone(), rows)
    assert again.tolist() == tokens.tolist()


def test_random_numbers_depend_on_the_position_alone() -> None:
    one = argument(5, 3, WARM)
    logits = torch.randn(1, 97, generator=torch.Generator().manual_seed(1)).expand(200, -1)
    rows = BatchRows([one])
    row_by_row = [int(sample(logits[:1].clone(), rows, np.array([k]))[0]) for k in range(200)]
    one_by_one = [
        int(sample_rows(logits[:1].clone(), [(one, k)])[0]) for k in range(200)
    ]  # another batch each time
    at_once = sample_rows(logits.clone(), [(argument(5, 3 + k, WARM), 0) for k in range(200)])[
        0
    ].tolist()
    assert row_by_row == one_by_one == at_once and len(set(at_once)) > 5
