"""A store listens where the job's own processes are, and nowhere else."""

from __future__ import annotations

import errno
import socket
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from trainer.ranks import listening
from trainer.ranks.listening import listening_socket, listening_store

TIMEOUT = timedelta(seconds=60)


def address_of(host: str, *, one_node: bool) -> str:
    with listening_socket(host, 0, one_node=one_node) as server:
        return str(server.getsockname()[0])


def test_ranks_of_one_machine_are_reached_from_it_alone() -> None:
    store = listening_store("127.0.0.1", 0, ranks=2, one_node=True, timeout=TIMEOUT)
    other = TCPStore("127.0.0.1", store.port, 2, False, timeout=TIMEOUT, wait_for_workers=False)
    other.set("a", "b")
    assert store.get("a") == b"b"
    # Another address of this machine finds nobody on the port.
    with socket.socket() as elsewhere:
        elsewhere.settimeout(60)
        assert elsewhere.connect_ex(("127.0.0.2", store.port)) == errno.ECONNREFUSED


def test_a_name_that_others_resolve_differently(monkeypatch: pytest.MonkeyPatch) -> None:
    assert address_of("127.0.1.1", one_node=False) == "0.0.0.0"
    assert address_of("127.0.1.1", one_node=True) == "127.0.1.1"
    assert address_of("192.0.2.1", one_node=False) == "0.0.0.0"
    monkeypatch.setattr(listening, "_address_of", lambda host: (socket.AF_INET, "127.0.0.3"))
    assert address_of("node", one_node=True) == "127.0.0.3"


def test_a_port_in_use_is_an_error() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OSError) as error:
            listening_socket("127.0.0.1", taken.getsockname()[1], one_node=True)
        assert error.value.errno == errno.EADDRINUSE
