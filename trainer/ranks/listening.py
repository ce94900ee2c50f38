"""TCP stores that listen on the job's own address. A store alone would listen on all interfaces of
the machine, and knows no token.
"""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

BACKLOG = 1024
"""Every rank of a run may connect at the same moment."""


def listening_store(
    host: str, port: int, *, ranks: int, one_node: bool, timeout: timedelta
) -> TCPStore:
    """A store that this process serves on the address of ``host``; port 0: a free one.

    Raises OSError when the port can't be bound.
    """
    with listening_socket(host, port, one_node=one_node) as server:
        bound = int(server.getsockname()[1])
        return TCPStore(
            host,
            bound,
            ranks,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            master_listen_fd=server.detach(),
        )


def listening_socket(host: str, port: int, *, one_node: bool) -> socket.socket:
    """A socket that listens on the address of ``host``.

    On all interfaces where that can't be told: a name that this machine resolves to itself
    (127.0.1.1) while ranks on others resolve it to its address, or an address that is none of this
    machine's. ``one_node``: all ranks are here. Raises OSError when the port can't be bound.
    """
    family, address = _address_of(host)
    if not one_node and address.startswith("127."):
        address = ""
    try:
        return _listen(family, address, port)
    except OSError:
        if not address or _is_mine(family, address):
            raise
        return _listen(socket.AF_INET, "", port)


def _address_of(host: str) -> tuple[int, str]:
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError:
        return socket.AF_INET, ""
    family, _, _, _, address = min(found, key=lambda entry: entry[0] != socket.AF_INET)
    return family, str(address[0])


def _is_mine(family: int, address: str) -> bool:
    """Whether ``address`` is one of this machine's."""
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.bind((address, 0))
    except OSError:
        return False
    return True


def _listen(family: int, address: str, port: int) -> socket.socket:
    server = socket.socket(family, socket.SOCK_STREAM)
    try:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        server.bind((address, port))
        server.listen(BACKLOG)
    except OSError:
        server.close()
        raise
    return server
