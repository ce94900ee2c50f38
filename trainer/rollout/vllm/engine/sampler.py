"""Sampling inside vLLM's worker, with the random numbers and log-probs of the hf engine.

vLLM's own sampler could be seeded for each request, but a response that is stopped and continued
would then be another one; it makes a random number for every token of the vocabulary; and its
log-probs are those before the temperature, or after the temperature *and* top-p and top-k, neither
of which a training pass computes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.rollout.hf.sampling import sample_tokens, uniforms
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.requests import Request

EXTRA_ARGUMENT = "plimsoll"
"""The extra argument of a request that holds its sampling. Its current block of random numbers is
cached there as well, so that both end together.
"""
BLOCK = 64
"""Number of positions whose random numbers are made at once."""


def extra_arguments(request: Request, sampling: Sampling) -> dict[str, Any]:
    """Return what the sampler needs of a request, as plain data that may be sent to a process."""
    return {
        EXTRA_ARGUMENT: {
            "seed": request.seed % 2**64,
            "step": request.step,
            "sample": request.sample_id,
            "position": request.position,
            "sampling": asdict(sampling),
        }
    }


def patch_model_runner(runner: Any) -> None:
    """Replace the sampler of vLLM's model ``runner``."""
    batch_states: list[Any] = []
    rows = BatchRows([])

    def forward(logits: Tensor, *_: Any, **__: Any) -> Any:
        nonlocal batch_states, rows
        batch = runner.input_batch
        states = [runner.requests[request_id] for request_id in batch.req_ids]
        if states != batch_states:  # compares objects: an id may be used again
            batch_states = states
            rows = BatchRows([s.sampling_params.extra_args[EXTRA_ARGUMENT] for s in states])
        count = batch.num_reqs
        num_drawn = batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count]
        return _sampler_output(*sample(logits, rows, num_drawn))

    runner.sampler.forward = forward


class BatchRows:
    """The requests of a batch, one for each row of logits, and their next random numbers."""

    def __init__(self, arguments: Sequence[dict[str, Any]]) -> None:
        """``arguments``: for each row the result of :func:`extra_arguments`."""
        self._arguments = list(arguments)
        self._position = np.array([a["position"] for a in arguments], dtype=np.int64)
        self._block_start = np.full(len(arguments), -1, dtype=np.int64)
        self._numbers = np.empty((len(arguments), BLOCK))
        self._all_rows = np.arange(len(arguments))
        by_sampling: dict[tuple[Any, ...], list[int]] = {}
        for row, argument in enumerate(arguments):
            by_sampling.setdefault(tuple(argument["sampling"].values()), []).append(row)
        self.by_sampling = [
            (Sampling(**arguments[rows[0]]["sampling"]), rows) for rows in by_sampling.values()
        ]
        """Each sampling of the batch, and the rows that use it."""

    def __len__(self) -> int:
        return len(self._arguments)

    def random_numbers(self, num_drawn: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """Return float64 [rows]: the number of each row's next token, in (0, 1).

        ``num_drawn`` int [rows] is the number of tokens that each row has. Nobody uses the number
        of a row that is still in its prefill.
        """
        position = self._position + num_drawn
        block_start = position // BLOCK * BLOCK
        for row in np.flatnonzero(block_start != self._block_start):
            argument = self._arguments[row]
            start = int(block_start[row])
            if argument.get("start") != start:
                block = uniforms(
                    argument["seed"], argument["step"], [argument["sample"]], start, BLOCK
                )
                argument["start"] = start
                argument["numbers"] = block[0].numpy()
            self._block_start[row] = start
            self._numbers[row] = argument["numbers"]
        numbers: npt.NDArray[np.float64] = self._numbers[self._all_rows, position - block_start]
        return numbers


def sample(
    logits: Tensor, rows: BatchRows, num_drawn: npt.NDArray[np.integer[Any]]
) -> tuple[Tensor, Tensor]:
    """Draw the next token of each row.

    ``logits`` [rows, vocabulary] may be overwritten; ``num_drawn`` int [rows] is the number of
    tokens that each row has. Returns tokens int64 [rows] and log-probs float32 [rows], nats.
    """
    if len(rows) != len(logits):
        raise RuntimeError(f"{len(logits)} rows of logits for {len(rows)} requests")
    u = None
    if not all(sampling.greedy for sampling, _ in rows.by_sampling):
        u = torch.from_numpy(rows.random_numbers(num_drawn)).to(logits.device)
    if len(rows.by_sampling) == 1:
        return sample_tokens(logits, u, rows.by_sampling[0][0])
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    for sampling, row_numbers in rows.by_sampling:
        index = torch.tensor(row_numbers, device=logits.device)
        numbers = None if u is None or sampling.greedy else u[index]
        tokens[index], log_probs[index] = sample_tokens(logits[index], numbers, sampling)
    return tokens, log_probs


def _sampler_output(tokens: Tensor, log_probs: Tensor) -> Any:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    ids = tokens.to(torch.int32).unsqueeze(-1)
    ranks = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    return SamplerOutput(
        sampled_token_ids=ids,
        logprobs_tensors=LogprobsTensors(ids, log_probs.unsqueeze(-1), ranks),
    )
