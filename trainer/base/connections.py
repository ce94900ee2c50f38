"""Connections between processes of a run: addresses with a token, and time-outs of lost machines.

Standard library only.
"""

from __future__ import annotations

import secrets
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trainer.base.json_files import is_count, is_text

LOOPBACK = "127.0.0.1"
TOKEN_BYTES = 32
KEEPALIVE_IDLE_S = 15
KEEPALIVE_INTERVAL_S = 5
KEEPALIVE_PROBES = 6
LOST_S = KEEPALIVE_IDLE_S + KEEPALIVE_INTERVAL_S * KEEPALIVE_PROBES
"""A machine that gives no sign for so long counts as lost, seconds."""


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where a process listens."""

    host: str
    port: int
    token: str = field(repr=False)
    """Requests have to carry it."""


def is_port(value: Any) -> bool:
    """Whether ``value`` is the number of a TCP port."""
    return is_count(value) and 0 < value < 1 << 16


def address_from(values: Mapping[str, Any]) -> Address | None:
    """The address in a file's object; None when it holds none."""
    host = values.get("host")
    port = values.get("port")
    token = values.get("token")
    if not is_text(host) or not is_text(token) or not is_port(port):
        return None
    return Address(host=str(host), port=int(port or 0), token=str(token))


def new_token() -> str:
    """Return a random token."""
    return secrets.token_hex(TOKEN_BYTES)


def keep_alive(connection: socket.socket) -> None:
    """Let the system end ``connection`` when its other machine has been lost for ``LOST_S``."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)


def read_status(connection: socket.socket) -> int:
    """Read the head of an HTTP response, and no more; return its status, 0 when there is none."""
    with connection.makefile("rb", 0) as response:
        words = response.readline().split()
        while response.readline().strip():
            pass
    return int(words[1]) if len(words) > 1 else 0
