"""Weights on their way to a machine that is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from trainer.launch.rollout_nodes import Address
from trainer.rollout.vllm.client.status_file import LOOPBACK
from trainer.rollout.vllm.nodes.weight_upload import Upload, parts

PATIENCE_S = 450.0
"""What a host that lives may take."""


@pytest.fixture
def listening(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr("trainer.rollout.vllm.nodes.weight_upload.LOST_S", 0.5)
    with socket.socket() as mute:
        mute.bind((LOOPBACK, 0))
        mute.listen(0)
        yield mute


def upload(to: socket.socket) -> Upload:
    return Upload(Address(host=LOOPBACK, port=to.getsockname()[1], token="t"), timeout_s=PATIENCE_S)


def test_it_takes_no_connection(listening: socket.socket) -> None:
    with ExitStack() as calls:
        for _ in range(4):  # more than may wait there: further ones are not heard
            caller = calls.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listening.getsockname())
        with pytest.raises(TimeoutError):
            upload(listening).begin(1)


def test_it_takes_no_more_bytes(listening: socket.socket) -> None:
    """It had room for the weights, and is gone then."""
    over = threading.Event()

    def answer() -> None:
        line, _ = listening.accept()
        with line:
            line.recv(1 << 16)
            line.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            over.wait(200)

    gone = threading.Thread(target=answer, daemon=True)
    gone.start()
    sent = upload(listening)
    try:
        sent.begin(1)
        with pytest.raises(TimeoutError):
            sent.send(*parts("w", torch.zeros(1 << 24)))
            sent.end()
    finally:
        over.set()
        sent.close()
        gone.join(200)
