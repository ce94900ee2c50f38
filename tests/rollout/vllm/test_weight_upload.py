"""Weight uploads to a machine that is gone."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
import torch

from trainer.base.connections import LOOPBACK, Address
from trainer.rollout.vllm.nodes.weight_upload import WeightUpload, encode_tensor

REPLY_TIMEOUT_S = 450.0
"""How long an agent that lives may take."""


@pytest.fixture
def listener(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    monkeypatch.setattr("trainer.rollout.vllm.nodes.weight_upload.LOST_S", 0.5)
    with socket.socket() as silent:
        silent.bind((LOOPBACK, 0))
        silent.listen(0)
        yield silent


def make_upload(listener: socket.socket) -> WeightUpload:
    return WeightUpload(
        Address(host=LOOPBACK, port=listener.getsockname()[1], token="t"), timeout_s=REPLY_TIMEOUT_S
    )


def test_a_machine_that_accepts_no_connection(listener: socket.socket) -> None:
    with ExitStack() as calls:
        for _ in range(4):  # more than its backlog: further connections get no answer
            caller = calls.enter_context(socket.socket())
            caller.setblocking(False)
            caller.connect_ex(listener.getsockname())
        with pytest.raises(TimeoutError):
            make_upload(listener).begin(1)


def test_a_machine_that_is_gone_after_the_upload_began(listener: socket.socket) -> None:
    finished = threading.Event()

    def accept_upload() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1 << 16)
            connection.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            finished.wait(200)

    thread = threading.Thread(target=accept_upload, daemon=True)
    thread.start()
    upload = make_upload(listener)
    try:
        upload.begin(1)
        with pytest.raises(TimeoutError):
            upload.send(*encode_tensor("w", torch.zeros(1 << 24)))
            upload.end()
    finally:
        finished.set()
        upload.close()
        thread.join(200)
