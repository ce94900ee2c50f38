"""Draws tokens inside vLLM's worker as the hf engine draws them: the same random numbers, the same
log-probs.

vLLM's own sampler would do with a seed for each request, but then a response that is stopped and
gone on with is another one; it makes a random number for every token of the vocabulary; and it has
log-probs before the temperature, or after it *and* after top-p and top-k, not those that a training
pass gives.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from trainer.rollout.hf.sampling import choose, uniforms
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.requests import Request

ARGUMENT = "plimsoll"
"""Extra argument of a request: how it draws. Its random numbers are kept there too, and go with
it.
"""
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
    states: list[Any] = []
    rows = Rows([])

    def forward(logits: Tensor, *_: Any, **__: Any) -> Any:
        nonlocal states, rows
        batch = runner.input_batch
        now = [runner.requests[key] for key in batch.req_ids]
        if now != states:  # the same objects: a key may come again
            states, rows = now, Rows([state.sampling_params.extra_args[ARGUMENT] for state in now])
        count = batch.num_reqs
        return _output(
            *draw(logits, rows, batch.num_tokens_no_spec[:count] - batch.num_prompt_tokens[:count])
        )

    runner.sampler.forward = forward


class Rows:
    """The requests of a batch, in the order of its rows, and the random numbers they draw with
    next.
    """

    def __init__(self, arguments: Sequence[dict[str, Any]]) -> None:
        """``arguments``: what :func:`extra_arguments` told of each."""
        self._arguments = list(arguments)
        self._position = np.array([a["position"] for a in arguments], dtype=np.int64)
        self._start = np.full(len(arguments), -1, dtype=np.int64)
        self._numbers = np.empty((len(arguments), BLOCK))
        self._all = np.arange(len(arguments))
        ways: dict[tuple[Any, ...], list[int]] = {}
        for row, argument in enumerate(arguments):
            ways.setdefault(tuple(argument["how"].values()), []).append(row)
        self.ways = [(Sampling(**arguments[rows[0]]["how"]), rows) for rows in ways.values()]
        """How rows are drawn, and which ones so."""

    def __len__(self) -> int:
        return len(self._arguments)

    def numbers(self, drawn: npt.NDArray[np.integer[Any]]) -> npt.NDArray[np.float64]:
        """float64 [rows]: of each, the number of the token behind ``drawn`` [rows] others. A row
        that is not through its prompt asks in vain.
        """
        position = self._position + drawn
        start = position // BLOCK * BLOCK
        for row in np.flatnonzero(start != self._start):
            argument, first = self._arguments[row], int(start[row])
            if argument.get("start") != first:
                made = uniforms(
                    argument["seed"], argument["step"], [argument["sample"]], first, BLOCK
                )
                argument["start"], argument["numbers"] = first, made[0].numpy()
            self._start[row], self._numbers[row] = first, argument["numbers"]
        found: npt.NDArray[np.float64] = self._numbers[self._all, position - start]
        return found


def draw(logits: Tensor, rows: Rows, drawn: npt.NDArray[np.integer[Any]]) -> tuple[Tensor, Tensor]:
    """Token int64 [rows] and log-prob float32 [rows] of each row, which has ``drawn`` int [rows]
    tokens.
    """
    if len(rows) != len(logits):
        raise RuntimeError(f"{len(logits)} rows of logits for {len(rows)} requests")
    u = None
    if not all(how.greedy for how, _ in rows.ways):
        u = torch.from_numpy(rows.numbers(drawn)).to(logits.device)
    if len(rows.ways) == 1:
        return choose(logits, u, rows.ways[0][0])
    tokens = torch.zeros(len(logits), dtype=torch.int64, device=logits.device)
    log_probs = torch.zeros(len(logits), dtype=torch.float32, device=logits.device)
    for how, places in rows.ways:
        where = torch.tensor(places, device=logits.device)
        tokens[where], log_probs[where] = choose(
            logits[where], None if u is None or how.greedy else u[where], how
        )
    return tokens, log_probs


def _output(tokens: Tensor, log_probs: Tensor) -> Any:
    from vllm.v1.outputs import LogprobsTensors, SamplerOutput

    ids = tokens.to(torch.int32).unsqueeze(-1)
    ranks = torch.zeros(len(tokens), dtype=torch.int32, device=tokens.device)
    return SamplerOutput(
        sampled_token_ids=ids,
        logprobs_tensors=LogprobsTensors(ids, log_probs.unsqueeze(-1), ranks),
    )
