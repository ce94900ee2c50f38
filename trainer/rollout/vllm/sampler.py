"""Draws tokens inside vLLM's worker as the hf engine draws them: the same random numbers, the same log-probs.

vLLM's own sampler would do with a seed for each request, but then a response that is stopped and gone on with is
another one; it makes a random number for every token of the vocabulary; and it has log-probs before the temperature, or
after it *and* after top-p and top-k, not those that a training pass gives.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor

from trainer.rollout.hf.sampling import choose, uniforms
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.tally import Request

ARGUMENT = "plimsoll"
"""Extra argument of a request: how it draws. Its random numbers are kept there too, and go with it."""
BLOCK = 64
"""Positions whose random numbers are made at a time."""


def extra_arguments(request: Request, sampling: Sampling) -> dict[str, Any]:
    """What a request tells the sampler; plain data, since it may travel to another process."""
    return {
        ARGUMENT: {
            "seed": request.seed % 2**64,
            "step": request.step,
            "sample": request.sample_id,
            "position": request.position,
            "how": asdict(sampling),
        }
    }


def install(runner: Any) -> None:
    """Let vLLM's model ``runner`` draw so."""

    def forward(logits: Tensor, *_: Any, **__: Any) -> Any:
        told = [_of(runner.requests[key]) for key in runner.input_batch.req_ids]
        if len(told) != len(logits):
            raise RuntimeError(f"{len(logits)} rows of logits for {len(told)} requests")
        return _output(*draw(logits, told))

    runner.sampler.forward = forward


def draw(logits: Tensor, told: list[tuple[dict[str, Any], int]]) -> tuple[Tensor, Tensor]:
    """Token int64 [rows] and log-prob float32 [rows] of each row; ``told``: its argument, and the tokens it has."""
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    ways: dict[tuple[Any, ...], list[int]] = {}
    for row, (argument, _) in enumerate(told):
        ways.setdefault(tuple(argument["how"].values()), []).append(row)
    for rows in ways.values():
        how = Sampling(**told[rows[0]][0]["how"])
        u = None
        if not how.greedy:
            numbers = [_number(*told[row]) for row in rows]
            u = torch.tensor(numbers, dtype=torch.float64).to(logits.device)
        if len(rows) == len(logits):
            return choose(logits, u, how)
        where = torch.tensor(rows, device=logits.device)
        tokens[where], log_probs[where] = choose(logits[where], u, how)
    return tokens, log_probs


def _of(state: Any) -> tuple[dict[str, Any], int]:
    return state.sampling_params.extra_args[ARGUMENT], len(state.output_token_ids)


def _number(argument: dict[str, Any], drawn: int) -> float:
    """The random number of the token behind ``drawn`` others. A row that is not through its prompt asks in vain."""
    position = argument["position"] + drawn
    start = position // BLOCK * BLOCK
    if argument.get("start") != start:
        made = uniforms(argument["seed"], argument["step"], [argument["sample"]], start, BLOCK)
        argument["start"], argument["numbers"] = start, made[0].tolist()
    return float(argument["numbers"][position - start])


def _output(tokens: Tensor, log_probs: Tensor) -> Any:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    ids = tokens.to(torch.int32).unsqueeze(-1)
    ranks = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    return SamplerOutput(
        sampled_token_ids=ids,
        logprobs_tensors=LogprobsTensors(ids, log_probs.unsqueeze(-1), ranks),
    )
