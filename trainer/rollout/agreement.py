"""Start-up check: an engine with weights of its own holds the trainer's, and means the same by a
log-prob.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from trainer.data.batch import Batch
from trainer.models import pack, token_stats
from trainer.rollout.protocol import Group, RolloutEngine
from trainer.rollout.settings import Sampling

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.15}
"""Largest difference of a log-prob, nats. In bfloat16 two correct orders of adding up are that far
apart.
"""
PROMPT, RESPONSE = 12, 8


class EngineDisagrees(RuntimeError):
    """Engine and trainer give one sample different log-probs: training on it would be silently
    wrong.
    """


def check_agreement(
    engine: RolloutEngine,
    module: nn.Module,
    *,
    vocabulary: int,
    dtype: torch.dtype,
    temperature: float = 1.0,
) -> float:
    """Let ``engine`` draw a short sample and ``module`` judge it; the largest difference of a
    log-prob, nats.

    Call it after the first ``update_weights``, on every rank that generates (under ZeRO 3 on every
    rank). Raises :class:`EngineDisagrees` where it is above 1e-4 in float32.
    """
    prompt = [(7 * k + 3) % vocabulary for k in range(PROMPT)]
    sampling = Sampling(max_response_length=RESPONSE, temperature=temperature)
    (done,) = list(
        engine.generate([Group(prompt_ids=prompt, sample_ids=[0], step=0)], sampling, seed=0)
    )
    sample = done.samples[0]
    wanted = trainer_log_probs(module, prompt, sample.response_ids, temperature=temperature)
    worst = float((wanted - sample.log_probs).abs().max())
    allowed = TOLERANCE.get(dtype, TOLERANCE[torch.bfloat16])
    if not worst <= allowed:
        raise EngineDisagrees(
            "the engine's log-probs of a test sample differ from the trainer's by up to "
            f"{worst:.3g} nats; "
            f"{allowed:g} is what rounding explains. Its weights or its sampling are not the "
            "trainer's: "
            "set actor_rollout_ref.rollout.name=hf, and report this model"
        )
    return worst


@torch.no_grad()
def trainer_log_probs(
    module: nn.Module, prompt_ids: list[int], response_ids: Tensor, *, temperature: float
) -> Tensor:
    """float32 [response tokens] on the CPU: what ``module`` gives this response, in one packed
    pass.
    """
    ids = torch.cat([torch.tensor(prompt_ids, dtype=torch.int64), response_ids])
    mask = torch.arange(len(ids)) >= len(prompt_ids)
    batch = Batch.from_sequences({"input_ids": [ids], "loss_mask": [mask]})
    return token_stats(module, pack(batch), temperature=temperature).log_probs.cpu()
