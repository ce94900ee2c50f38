"""A server without vLLM: its tokens follow from the seed, and a prompt may make it misbehave."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.rollout import Sampling
from trainer.rollout.vllm.engine.core import RequestOutput
from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.engine.shared_weights import SharedWeightsReader
from trainer.rollout.vllm.server.serve import serve

DIE = 901
HANG = 902
FREEZE = 903
BREAK = 904
HOLD = 905
REFUSE = 906
GO = "go"
"""Tokens of a prompt. DIE: the process is killed; HANG: its thread hangs; FREEZE: the process is
stopped; BREAK: a step raises; each once, while a file beside the spec is missing. HOLD: there is no
third token before the file GO exists. REFUSE: the request is not accepted.
"""


class FakeCore:
    """One token per step for all; the weights are one number, which is added to each log-prob."""

    def __init__(self, marks: Path) -> None:
        self._marks = marks
        self._rows: dict[str, tuple[Request, Sampling, list[int], list[float]]] = {}
        self._weight = float("nan")

    @property
    def num_unfinished(self) -> int:
        return len(self._rows)

    def add_request(self, request: Request, sampling: Sampling, eos_ids: list[int]) -> None:
        if REFUSE in request.prompt_ids:
            raise ValueError("no such token")
        self._rows[request.request_id] = (request, sampling, [], [])

    def step(self) -> list[RequestOutput]:
        ended = []
        for key, (request, sampling, ids, log_probs) in list(self._rows.items()):
            if len(ids) == 2:
                if HOLD in request.prompt_ids and not (self._marks / GO).exists():
                    time.sleep(0.001)
                    continue
                self._misbehave(request.prompt_ids)
            ids.append((request.seed + 7 * request.sample_id + request.position + len(ids)) % 100)
            log_probs.append(self._weight - ids[-1] * sampling.scale)
            if len(ids) == request.max_tokens:
                ended.append(RequestOutput(key, ids, log_probs, "length"))
                del self._rows[key]
        return ended

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        wanted = [key for key in list(request_ids) if key in self._rows]
        return [RequestOutput(key, *self._rows.pop(key)[2:], None) for key in wanted]

    def load_shared_weights(self, path: str, table: str) -> None:
        self._weight = float(next(SharedWeightsReader().read(path, table))[1].sum())

    def _misbehave(self, prompt: list[int]) -> None:
        for token in {DIE, HANG, FREEZE, BREAK} & set(prompt):
            if prompt[-1] == token or not (mark := self._marks / f"did-{token}").exists():
                if prompt[-1] != token:
                    mark.touch()
                if token == BREAK:
                    raise RuntimeError("a step that went wrong")
                if token == HANG:
                    time.sleep(600)
                os.kill(os.getpid(), signal.SIGKILL if token == DIE else signal.SIGSTOP)


def load(arguments: dict[str, Any]) -> Any:
    if arguments["dtype"] == "refused":
        raise UserError("vLLM refuses this model")
    return FakeCore(Path(arguments["model"]).parent)


if __name__ == "__main__":
    sys.exit(serve(Path(sys.argv[1]), load))
