"""Nodes of a job that train nothing and hold vLLM servers (``actor_rollout_ref.rollout.nnodes``):
how the ranks find them, and how they end together.

On each of these nodes one process, the host, keeps the servers; the job's other processes there
wait for its end. It tells its address and a token in a private note beside the ranks' own. Rank 0
holds a connection to every host: its life line. When that ends, whatever rank 0 died of, the host
ends its servers and itself.

Standard library only: a process that just waits has no use for torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.environment import RankInfo, RolloutTask, attempt_name, rollout_nodes
from trainer.base.errors import EXIT_OK, Failure, UserError

if TYPE_CHECKING:
    from trainer.config.schema import Config

KEY = "actor_rollout_ref.rollout.nnodes"
LIFE, BESIDE = "/life", "/beside"
"""What rank 0 holds on to, and what the other processes of the host's node do."""
CORES = "X-Cores"
"""Header: CPU cores that a process on the host's node may use and doesn't need."""
IDLE_S, INTERVAL_S, PROBES = 15, 5, 6
KEEPALIVE = (
    (socket.TCP_KEEPIDLE, IDLE_S),
    (socket.TCP_KEEPINTVL, INTERVAL_S),
    (socket.TCP_KEEPCNT, PROBES),
)
LOST_S = IDLE_S + INTERVAL_S * PROBES
"""After so long a machine that gives no sign counts as lost."""
POLL_S = 0.05
ANSWER_S = 30.0


@dataclass(frozen=True, kw_only=True)
class Address:
    """Where something listens."""

    host: str
    port: int
    token: str = field(repr=False)
    """Who carries it is answered."""


def require(config: Config) -> None:
    """Raises :class:`UserError` when the settings want nodes for servers and nothing has given this
    run any.
    """
    wanted = config.actor_rollout_ref.rollout.nnodes
    if wanted and wanted != rollout_nodes():
        raise UserError(
            f"{KEY}={wanted} puts vLLM servers on nodes of their own, which a Slurm job has: add "
            "-m "
            f"hydra/launcher=slurm. On this machine leave {KEY} out: the servers then run beside "
            "the trainer."
        )


def run_task(run_dir: Path, task: RolloutTask) -> int:
    """The life of a process on a node that only holds servers; its exit code."""
    from trainer.config import load_frozen

    patience = load_frozen(run_dir).trainer.join_timeout_s
    if task.local_id == 0:
        from trainer.rollout.vllm.nodes.agent import host

        return host(run_dir, task, patience_s=patience)
    _say(f"This node only holds vLLM servers: this process waits for their end ({KEY}).")
    address = _read(note(run_dir, task.node), time.monotonic() + patience)
    if address is None:
        raise Failure(
            "the host of this node's servers did not come within "
            f"trainer.join_timeout_s={patience:g}"
        )
    wait_for_end(hold(address, BESIDE))
    return EXIT_OK


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def note(run_dir: Path, node: int) -> Path:
    """The file with the address of the host on rollout node ``node``, of this attempt."""
    return run_dir / "rendezvous" / f"{attempt_name()}.rollout_{node}.json"


def publish(run_dir: Path, node: int, address: Address) -> None:
    """Write the note, for its owner's eyes only."""
    path = note(run_dir, node)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temp = path.with_suffix(f".{os.getpid()}")
    with open(os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        json.dump({"host": address.host, "port": address.port, "token": address.token}, file)
    temp.replace(path)


def find(run_dir: Path, count: int, timeout_s: float) -> list[Address]:
    """The hosts of ``count`` nodes. Raises TimeoutError that names those which did not come within
    ``timeout_s``.
    """
    until = time.monotonic() + timeout_s
    found = [_read(note(run_dir, node), until) for node in range(count)]
    if missing := [str(node) for node, address in enumerate(found) if address is None]:
        raise TimeoutError(
            f"{len(missing)} of {count} nodes for vLLM servers did not come within {timeout_s:g} "
            "s: number "
            f"{', '.join(missing)} of the job's last nodes. Look into the logs of their processes; "
            "where images or "
            "file systems start slowly, raise trainer.join_timeout_s."
        )
    return [address for address in found if address is not None]


def _read(path: Path, until: float) -> Address | None:
    while True:
        with contextlib.suppress(FileNotFoundError, ValueError):
            return Address(**json.loads(path.read_text()))
        if time.monotonic() > until:
            return None
        time.sleep(POLL_S)


@contextmanager
def held(config: Config, run_dir: Path, info: RankInfo) -> Iterator[None]:
    """Rank 0 holds the life lines of all hosts inside; afterwards the hosts end."""
    with ExitStack() as lines:
        if info.rank == 0 and (count := config.actor_rollout_ref.rollout.nnodes):
            for address in find(run_dir, count, config.trainer.join_timeout_s):
                lines.callback(_let_go, hold(address, LIFE))
        yield


def hold(address: Address, path: str) -> socket.socket:
    """An open connection to a host, which has answered. Raises OSError when it doesn't."""
    line = socket.create_connection((address.host, address.port), timeout=ANSWER_S)
    keep_alive(line)
    cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
    lines = [
        f"GET {path} HTTP/1.1",
        f"Host: {address.host}",
        f"Authorization: Bearer {address.token}",
    ]
    line.sendall("\r\n".join([*lines, f"{CORES}: {cores}", "", ""]).encode())
    if (status := read_status(line)) != HTTPStatus.OK:
        line.close()
        raise ConnectionError(f"the host at {address.host}:{address.port} did not answer: {status}")
    line.settimeout(None)
    return line


def read_status(line: socket.socket) -> int:
    """The status of the answer on ``line``, of which no more than its head is read; 0 where there
    is none.
    """
    with line.makefile("rb", 0) as answer:
        words = answer.readline().split()
        while answer.readline().strip():
            pass
    return int(words[1]) if len(words) > 1 else 0


def keep_alive(line: socket.socket) -> None:
    """Let a connection whose other machine is lost end by itself."""
    line.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEPALIVE:
        line.setsockopt(socket.IPPROTO_TCP, option, value)


def wait_for_end(line: socket.socket) -> None:
    """Until the other side is gone."""
    with line, contextlib.suppress(OSError):
        while line.recv(1024):
            pass


def _let_go(line: socket.socket) -> None:
    with line, contextlib.suppress(OSError):
        line.shutdown(socket.SHUT_RDWR)  # a forked child may hold the connection too
