"""A server without vLLM: its core draws tokens that follow from the seed, and misbehaves where a
prompt says so.
"""

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
from trainer.rollout.vllm.engine.core import Drawn
from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.server.serve import serve
from trainer.rollout.vllm.server.shared_weights import Reader

DIE, HANG, FREEZE, BREAK, HOLD, REFUSE = 901, 902, 903, 904, 905, 906
GO = "go"
"""Tokens of a prompt: the process is killed, its thread hangs, the process is stopped, a step
raises; once each, the first time that the file beside the spec is not there. HOLD: it gets no third
token before the file GO lies there. REFUSE: it is not taken.
"""


class FakeCore:
    """One token per step for all; the weights are one number, which is added to each log-prob."""

    def __init__(self, marks: Path) -> None:
        self._marks, self._rows, self._weight = marks, {}, float("nan")  # type: ignore[var-annotated]

    @property
    def open(self) -> int:
        return len(self._rows)

    def add(self, request: Request, sampling: Sampling, eos_ids: list[int]) -> None:
        if REFUSE in request.prompt_ids:
            raise ValueError("no such token")
        self._rows[request.key] = (request, sampling, [], [])

    def step(self) -> list[Drawn]:
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
                ended.append(Drawn(key, ids, log_probs, "length"))
                del self._rows[key]
        return ended

    def abort(self, keys: Iterable[str]) -> list[Drawn]:
        wanted = [key for key in list(keys) if key in self._rows]
        return [Drawn(key, *self._rows.pop(key)[2:], None) for key in wanted]

    def load_shared(self, path: str, table: str) -> None:
        self._weight = float(next(Reader().read(path, table))[1].sum())

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
