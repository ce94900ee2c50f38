"""A port for the ranks' first meeting."""

from __future__ import annotations

import errno
import random
import socket
from pathlib import Path

LOWEST = 10_000


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that is free now and below the ephemeral range, where no outgoing connection can take it meanwhile."""
    top = max(LOWEST + 1000, _ephemeral_start())
    for _ in range(200):
        port = random.randrange(LOWEST, top)
        with socket.socket() as probe:
            try:
                probe.bind((host, port))
            except OSError as error:
                if error.errno in (errno.EADDRINUSE, errno.EACCES):
                    continue
                raise
            return port
    raise OSError(errno.EADDRINUSE, f"no free port between {LOWEST} and {top} in 200 tries")


def _ephemeral_start() -> int:
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 32768


def is_port_clash(error_text: str) -> bool:
    """Does a rank's error say that its port was taken between the probe and the bind?"""
    text = error_text.lower()
    return "eaddrinuse" in text or "address already in use" in text
