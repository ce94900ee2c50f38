"""Proof, at the start of a run, that the generation engine and the trainer hold the same model."""

from __future__ import annotations

from typing import Any

import torch

from trainer.data import Batch
from trainer.parallel.engine import Engine
from trainer.rollout import Group, RolloutEngine, Sample, Sampling
from trainer.steps.forward import run_micro_batch
from trainer.steps.stow import Stowage

TOKENS = 8
"""Drawn for the comparison."""
TEXT = "The answer is 1 2 3"
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.25, torch.float16: 0.05}
"""Largest difference of a token's log-prob, nats: programs round differently; other weights are off by far more."""


class Disagreement(RuntimeError):
    """The engine generates with other weights, or computes something else."""


def check_agreement(rollout: RolloutEngine, engine: Engine, tokenizer: Any) -> float:
    """The largest difference between the log-probs of a short sample in ``rollout`` and in training's own forward pass.

    Called with the weights just handed over; every rank calls it. Raises Disagreement when it is too large: then every
    ratio of the loss would be wrong, silently.
    """
    prompt: list[int] = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    group = Group(prompt_ids=prompt, sample_ids=[0], step=0)
    sampling = Sampling(max_response_length=TOKENS)
    sample = next(iter(rollout.generate([group], sampling, seed=0))).samples[0]
    with engine.whole_weights() as module:
        trained = _log_probs(module, prompt, sample)
    difference = float((trained - sample.log_probs).abs().max())
    dtype = next(iter(engine.module.parameters())).dtype
    if not difference <= TOLERANCE.get(dtype, 1e-4):
        raise Disagreement(
            f"the rollout engine and the trainer disagree: log-probs of {len(sample.response_ids)} tokens differ by up "
            f"to {difference:.3g} nats (at most {TOLERANCE.get(dtype, 1e-4):g} in {dtype}). It reads this model "
            "otherwise than transformers; use actor_rollout_ref.rollout.name=hf"
        )
    return difference


@torch.no_grad()
def _log_probs(module: torch.nn.Module, prompt: list[int], sample: Sample) -> torch.Tensor:
    """float32 [response tokens] on the CPU."""
    ids = torch.cat([torch.tensor(prompt), sample.response_ids])
    mask = torch.arange(len(ids)) >= len(prompt)
    batch = Batch.from_sequences(
        {"input_ids": [ids], "loss_mask": [mask]},
        {"groups": torch.zeros(1, dtype=torch.int64), "prompt_lengths": torch.tensor([len(prompt)])},
    )
    training = module.training
    module.eval()
    try:
        _, stats = run_micro_batch(module, batch, Stowage(dynamic=True, budget=len(ids)), temperature=1.0)
    finally:
        module.train(training)
    return stats.log_probs.detach().float().cpu()
