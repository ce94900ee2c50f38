"""Nodes of a job that train nothing and hold vLLM servers (``actor_rollout_ref.rollout.nnodes``).

How ranks find them, and how all end together: on each of these nodes one process, the node agent,
supervises the servers; the job's other processes there wait for its end. The agent publishes its
address and a token in a private file in ``RUN_DIR/rendezvous``. Rank 0 holds a connection to every
agent, its lifeline. When that closes, whatever ended rank 0, the agent ends its servers and itself.

No torch in here: a process that only waits does not need it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base import atomic
from trainer.base.connections import Address, address_from, keep_alive, read_status
from trainer.base.errors import PeerLost, UserError
from trainer.base.json_files import read_object
from trainer.base.rank_info import RankInfo, attempt_name, num_rollout_nodes

if TYPE_CHECKING:
    from trainer.config.schema import Config

KEY = "actor_rollout_ref.rollout.nnodes"
LIFELINE_PATH = "/lifeline"
"""What rank 0 requests of a node agent, and holds open."""
PEER_PATH = "/peer"
"""What the other processes of a node agent's node request of it, and hold open."""
CORES_HEADER = "X-Cores"
"""CPU cores that a process on the agent's node may use and does not need."""
POLL_S = 0.05
CONNECT_TIMEOUT_S = 30.0


def require(config: Config) -> None:
    """Check that this job has the nodes for servers that ``config`` wants.

    Raises :class:`UserError` when it has not.
    """
    wanted = config.actor_rollout_ref.rollout.nnodes
    if wanted and wanted != num_rollout_nodes():
        raise UserError(
            f"{KEY}={wanted} puts vLLM servers on nodes of their own, which a Slurm job has: add "
            f"-m hydra/launcher=slurm. On this machine leave {KEY} out: the servers then run "
            "beside the trainer."
        )


def address_file(run_dir: Path, node: int) -> Path:
    """Return the path of the agent's address on rollout node ``node``, in this attempt."""
    return run_dir / "rendezvous" / f"{attempt_name()}.rollout_{node}.json"


def publish_address(run_dir: Path, node: int, address: Address) -> None:
    """Write the agent's address, readable by its owner only."""
    path = address_file(run_dir, node)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    atomic.write_json(path, {"host": address.host, "port": address.port, "token": address.token})


def find_agent(run_dir: Path, node: int, deadline: float) -> Address | None:
    """Wait for the agent of rollout node ``node`` to publish its address.

    Returns None when it has not by ``deadline`` (of ``time.monotonic``).
    """
    path = address_file(run_dir, node)
    while True:
        address = address_from(read_object(path))
        if address is not None:
            return address
        if time.monotonic() > deadline:
            return None
        time.sleep(POLL_S)


def find_agents(run_dir: Path, count: int, timeout_s: float) -> list[Address]:
    """Wait for the agents of ``count`` nodes and return their addresses.

    Raises PeerLost that names those which have not published any within ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    addresses: list[Address] = []
    missing: list[str] = []
    for node in range(count):
        address = find_agent(run_dir, node, deadline)
        if address is None:
            missing.append(str(node))
        else:
            addresses.append(address)
    if missing:
        raise PeerLost(
            f"{len(missing)} of {count} nodes for vLLM servers did not come within {timeout_s:g} "
            f"s: number {', '.join(missing)} of the job's last nodes. Look into the logs of their "
            "processes; where images or file systems start slowly, raise trainer.join_timeout_s."
        )
    return addresses


@contextmanager
def lifelines(config: Config, run_dir: Path, info: RankInfo) -> Iterator[None]:
    """Context in which rank 0 holds the lifelines of all agents; afterwards the agents end.

    Raises PeerLost when an agent does not come within ``trainer.join_timeout_s``.
    """
    count = config.actor_rollout_ref.rollout.nnodes
    with ExitStack() as stack:
        if info.rank == 0 and count:
            for address in find_agents(run_dir, count, config.trainer.join_timeout_s):
                stack.callback(_close, connect(address, LIFELINE_PATH))
        yield


def connect(address: Address, path: str) -> socket.socket:
    """Request ``path`` of an agent and return the open connection.

    Raises OSError when the agent does not accept it.
    """
    connection = socket.create_connection((address.host, address.port), timeout=CONNECT_TIMEOUT_S)
    keep_alive(connection)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    head = [
        f"GET {path} HTTP/1.1",
        f"Host: {address.host}",
        f"Authorization: Bearer {address.token}",
        f"{CORES_HEADER}: {cores}",
        "",
        "",
    ]
    connection.sendall("\r\n".join(head).encode())
    status = read_status(connection)
    if status != HTTPStatus.OK:
        connection.close()
        raise ConnectionError(
            f"the node agent at {address.host}:{address.port} did not answer: {status}"
        )
    connection.settimeout(None)
    return connection


def wait_until_closed(connection: socket.socket) -> None:
    """Wait until the other side has closed ``connection``, or is gone."""
    with connection, contextlib.suppress(OSError):
        while connection.recv(1024):
            pass


def _close(connection: socket.socket) -> None:
    """Close ``connection`` for all processes: a forked child may have inherited it."""
    with connection, contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
