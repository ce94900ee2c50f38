"""Who may reach a server's port but has no token gets neither time, threads nor memory."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from trainer.base.connections import LOOPBACK, Address
from trainer.rollout.vllm.client.json_request import try_send_json
from trainer.rollout.vllm.server import http
from trainer.rollout.vllm.server.http import AuthenticatedHandler, serve_in_threads


class Echo(AuthenticatedHandler):
    authorization = "Bearer t"

    def do_POST(self) -> None:
        if self.authorized():
            body = self.read_json()
            if body is not None:
                self.reply(body)


@pytest.fixture
def address() -> Address:
    return Address(host=LOOPBACK, port=serve_in_threads(LOOPBACK, Echo), token="t")


@contextlib.contextmanager
def connected(address: Address) -> Iterator[socket.socket]:
    with socket.create_connection((address.host, address.port), timeout=60) as connection:
        yield connection


def is_closed(connection: socket.socket) -> bool:
    """Whether the server has ended the connection without a word."""
    try:
        return connection.recv(1) == b""
    except ConnectionError:
        return True


def exchange(connection: socket.socket, request: bytes) -> tuple[int, dict[str, Any]]:
    """Status and body of the reply to ``request``."""
    connection.sendall(request)
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        data += connection.recv(4096)
    head, _, body = data.partition(b"\r\n\r\n")
    return int(head.split()[1]), json.loads(body)


def post(body: bytes, length: str | None = None) -> bytes:
    """A request with the token."""
    length = str(len(body)) if length is None else length
    head = f"POST / HTTP/1.1\r\nAuthorization: Bearer t\r\nContent-Length: {length}\r\n\r\n"
    return head.encode() + body


def test_a_byte_now_and_then_does_not_prolong_it(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "AUTH_TIMEOUT_S", 1.0)
    with connected(address) as connection:
        began = time.monotonic()
        drips = threading.Event()

        def drip() -> None:
            with contextlib.suppress(OSError):
                while not drips.wait(0.05):
                    connection.sendall(b"G")

        thread = threading.Thread(target=drip)
        thread.start()
        try:
            assert is_closed(connection)
        finally:
            drips.set()
            thread.join()
        assert 0.9 < time.monotonic() - began < 30


def test_a_long_head_is_not_read(address: Address) -> None:
    with connected(address) as connection:
        connection.sendall(b"GET / HTTP/1.1\r\n")
        with contextlib.suppress(OSError):
            for _ in range(40):
                connection.sendall(b"A: " + b"x" * 4000 + b"\r\n")
        assert is_closed(connection)


def test_the_oldest_of_too_many_strangers_goes(
    address: Address, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http, "MAX_STRANGERS", 3)
    with contextlib.ExitStack() as stack:
        known = stack.enter_context(connected(address))
        assert exchange(known, post(b"{}")) == (200, {})
        strangers = [stack.enter_context(connected(address)) for _ in range(9)]
        assert all(is_closed(one) for one in strangers[:6])
        assert try_send_json(address, "POST", "/", {"a": 1}, timeout_s=60) == {"a": 1}
        assert exchange(known, post(b"{}")) == (200, {})  # a client with the token stays


@pytest.mark.parametrize("body", [b"no json", b"[1]", b"\xff\xfe", b"[" * 90_000, b""])
def test_a_body_that_is_no_object_is_a_400(address: Address, body: bytes) -> None:
    with connected(address) as connection:
        refused = (400, {"error": "the body is no JSON object"})
        assert exchange(connection, post(body)) == refused


@pytest.mark.parametrize("length", ["-1", "many", "1e3", ""])
def test_a_wrong_length_is_a_400(address: Address, length: str) -> None:
    with connected(address) as connection:
        assert exchange(connection, post(b"", length))[0] == 400
