"""A pass of log-probs is left by all ranks together, however many micro-batches each has left."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.ranks.worlds import run_as_threads
from trainer.base import signals
from trainer.base.signals import StopRequested
from trainer.update import forward


@pytest.mark.parametrize(("sync", "micro_batches"), [("micro", (6, 6)), ("step", (6, 2))])
def test_a_pass_is_left_between_micro_batches(
    monkeypatch: pytest.MonkeyPatch, sync: str, micro_batches: tuple[int, int]
) -> None:
    computed: list[int] = []
    lock = threading.Lock()

    def token_stats(*_: Any, **__: Any) -> Any:
        with lock:
            computed.append(1)
            if len(computed) == 2:
                monkeypatch.setattr(signals._request, "cause", "USR2")
        return SimpleNamespace(log_probs=torch.zeros(1))

    monkeypatch.setattr(forward, "token_stats", token_stats)
    monkeypatch.setattr(forward, "pack_micro_batch", lambda *_: SimpleNamespace(targets=[0]))
    empty = torch.zeros(1, dtype=torch.int64)
    batch: Any = SimpleNamespace(
        select=lambda indices: None, token_index=lambda indices: empty, num_tokens=1
    )
    plan: Any = SimpleNamespace(
        sync=sync, micro_batches=[[empty.numpy()] * count for count in micro_batches]
    )

    def work(world: Any) -> None:
        forward.log_prob_column(None, batch, plan, world, None, temperature=1.0)  # type: ignore[arg-type]

    raised = run_as_threads(2, work)
    assert [type(error) for error in raised] == [StopRequested] * 2
    assert len(computed) <= 4
