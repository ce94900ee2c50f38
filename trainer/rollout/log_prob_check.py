"""Check at the start: an engine with weights of its own computes the trainer's log-probs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.data.batch import Batch
from trainer.models import pack, token_stats
from trainer.rollout.protocol import Group, RolloutEngine
from trainer.rollout.settings import Sampling

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Largest difference of a log-prob, nats. In bfloat16 two correct orders of summation differ by
that much.
"""
PROMPT_LENGTH = 12
RESPONSE_LENGTH = 8


class LogProbMismatch(RuntimeError):
    """Engine and trainer compute different log-probs for one sample: training on them would be
    silently wrong.
    """


def check_log_probs(
    engine: RolloutEngine,
    module: nn.Module,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> float:
    """Let ``engine`` generate a short sample and compute its log-probs with ``module``; return the
    largest difference, nats.

    Called after the first ``update_weights`` on every rank that generates (under ZeRO-3 on every
    rank). Raises LogProbMismatch when it exceeds ``TOLERANCE``.
    """
    prompt = [(7 * k + 3) % vocabulary for k in range(PROMPT_LENGTH)]
    sampling = Sampling(max_response_length=RESPONSE_LENGTH, temperature=temperature)
    group = Group(prompt_ids=prompt, sample_ids=[0], step=0)
    (finished,) = list(engine.generate([group], sampling, seed=0))
    sample = finished.samples[0]
    expected = trainer_log_probs(module, prompt, sample.response_ids, temperature=temperature)
    difference = float((expected - sample.log_probs).abs().max())
    allowed = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    if not difference <= allowed:  # NaN fails too
        raise LogProbMismatch(
            "the engine's log-probs of a test sample differ from the trainer's by up to "
            f"{difference:.3g} nats; {allowed:g} is what rounding explains. Its weights or its "
            "sampling are not the trainer's: set actor_rollout_ref.rollout.name=hf, and report "
            "this model"
        )
    return difference


@torch.no_grad()
def trainer_log_probs(
    module: nn.Module, prompt_ids: list[int], response_ids: Tensor, *, temperature: float
) -> Tensor:
    """float32 [response tokens] on the CPU: log-probs of a response under ``module``, computed in
    one packed forward pass.
    """
    ids = torch.cat([torch.tensor(prompt_ids, dtype=torch.int64), response_ids])
    mask = torch.arange(len(ids)) >= len(prompt_ids)
    batch = Batch.from_sequences({"input_ids": [ids], "loss_mask": [mask]})
    return token_stats(module, pack(batch), temperature=temperature).log_probs.cpu()
