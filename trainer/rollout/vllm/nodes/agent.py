"""The process that keeps the servers of a node which trains nothing, for ranks on other nodes.

It is asked over HTTP on the interface that reaches rank 0's node, by those who have the token from
its note.
"""

from __future__ import annotations

import dataclasses
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from trainer.base import environment
from trainer.base.environment import RolloutTask
from trainer.base.errors import EXIT_OK, Failure, UserError
from trainer.launch.rollout_nodes import BESIDE, CORES, LIFE, Address, keep_alive, publish
from trainer.rollout.vllm.client.pool import NodeServers, Order
from trainer.rollout.vllm.client.resources import cache_bytes, server_environments
from trainer.rollout.vllm.client.status_file import TOKEN_BYTES, Notice
from trainer.rollout.vllm.client.supervisor import Limits
from trainer.rollout.vllm.engine.model_folder import make_private
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.nodes.weight_upload import receive
from trainer.rollout.vllm.server.http import Guarded, serve_in_threads
from trainer.rollout.vllm.server.shared_weights import Arrival

COMPANY_S = 30.0
"""Longest wait for the other processes of this node, whose cores the servers get."""


def folder_of(run_dir: Path, node: int) -> Path:
    """Where the servers of rollout node ``node`` keep their logs."""
    return run_dir / "vllm" / f"rollout_node_{node}"


def host(run_dir: Path, task: RolloutTask, *, patience_s: float) -> int:
    """Keep servers for rank 0, as it asks, until it is gone; the exit code.

    Raises Failure when it has not come within ``patience_s``.
    """
    environment.prepare(task.tasks)
    ip, token = own_address(task.master_addr), secrets.token_hex(TOKEN_BYTES)
    folder = folder_of(run_dir, task.node)
    make_private(folder)
    kept = Host(folder, ip=ip, token=token, tasks=task.tasks)
    port = serve_in_threads(ip, _handler(kept, token))
    publish(run_dir, task.node, Address(host=ip, port=port, token=token))
    _say(
        f"This node only holds vLLM servers, for the ranks of other nodes; {ip}:{port}. Their "
        f"logs: {folder}"
    )
    if not kept.held.wait(patience_s):
        raise Failure(
            "rank 0 did not come for this node's servers within "
            f"trainer.join_timeout_s={patience_s:g}"
        )
    kept.over.wait()
    kept.close()
    _say("Rank 0 has ended, and so have this node's servers.")
    return EXIT_OK


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def own_address(other: str) -> str:
    """The address of this machine that ``other``'s packets come to. Nothing is sent.

    Raises :class:`UserError` when there is no way to ``other``.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((other, 9))
        except OSError as error:
            raise UserError(
                f"this node finds no way to {other}, rank 0's node ({error}): set MASTER_ADDR in "
                "the job's environment "
                "to an address that all nodes reach"
            ) from error
        return str(probe.getsockname()[0])


class Host:
    """What is asked of this process. Called from many threads."""

    def __init__(self, folder: Path, *, ip: str, token: str, tasks: int) -> None:
        """``tasks``: processes of the job on this node."""
        self.held, self.over = threading.Event(), threading.Event()
        """Rank 0 has come; it has gone."""
        self._name = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
        self._tasks = tasks
        self._cores = set(os.sched_getaffinity(0))
        self._company = threading.Semaphore(0)
        self._notice = Notice(folder, secrets.token_hex(6))
        self._servers = NodeServers(folder, self._notice, host=ip, token=token)

    def begin(self, asked: dict[str, Any]) -> None:
        """Start servers, placed on what this node has."""
        replicas, options = int(asked["replicas"]), Options.of(asked["options"])
        self._notice.begin(replicas)
        self._take_cores()
        try:
            env = server_environments(
                replicas, options.tensor_parallel_size, on_cpu=options.on_cpu, training=0
            )
            if options.cache is not None and options.cache_bytes is None:
                options = dataclasses.replace(
                    options, cache_bytes=cache_bytes(options.cache, replicas)
                )
            order = Order(
                arguments=options.arguments(asked["model"]),
                env=env,
                limits=Limits(**asked["limits"]),
                module=asked["module"],
            )
            self._servers.start(order)
        except UserError as error:
            self._notice.give_up(refused=str(error))
        except Exception as error:
            self._notice.give_up(failed=f"servers could not be started: {error}")
            raise

    def state(self) -> dict[str, Any] | None:
        """As ``asdict`` makes it of a :class:`State`, or None before ``begin``."""
        state = self._notice.read()
        if state is None:
            return None
        state = dataclasses.replace(
            state, refused=self._named(state.refused), failed=self._named(state.failed)
        )
        return dataclasses.asdict(state)

    def take(self, weights: Iterable[Arrival], version: int) -> None:
        """Keep these weights for the servers. Without them there can be no more generation."""
        try:
            self._servers.take(weights, version)
        except Exception as error:
            self._notice.give_up(failed=f"the weights of step {version} did not arrive: {error}")
            raise

    def close(self) -> None:
        """End the servers."""
        self._servers.close()

    def join(self, cores: str) -> None:
        """Another process of this node, which lends its ``cores``."""
        self._cores |= {int(core) for core in cores.split(",")}
        self._company.release()

    def _take_cores(self) -> None:
        """Slurm may have bound each process to some of the job's cores; servers inherit this
        one's.
        """
        until = time.monotonic() + COMPANY_S
        for _ in range(self._tasks - 1):
            self._company.acquire(timeout=max(0.0, until - time.monotonic()))
        os.sched_setaffinity(0, self._cores)

    def _named(self, text: str) -> str:
        return text and f"node {self._name}: {text}"


def _handler(kept: Host, token: str) -> type[Guarded]:
    class Bound(_Handler):
        wanted = f"Bearer {token}"
        host = kept

    return Bound


class _Handler(Guarded):
    host: Host

    def handle_expect_100(self) -> bool:
        """Not yet: see ``_go_on``."""
        return True

    def _go_on(self) -> None:
        self.send_response_only(HTTPStatus.CONTINUE)
        self.end_headers()

    def do_GET(self) -> None:
        """``/state``; ``/life`` and ``/beside``, which last until one of the two processes ends."""
        if self.refused() or self.elsewhere({"/state", LIFE, BESIDE}):
            return
        if self.path == "/state":
            self.answer(self.host.state())
            return
        keep_alive(self.connection)
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        if self.path == BESIDE:
            self.host.join(self.headers[CORES])
            threading.Event().wait()  # the process's end closes the connection
        self.host.held.set()
        try:
            self.rfile.read(1)
        except OSError:
            pass
        finally:
            self.host.over.set()

    def do_POST(self) -> None:
        """``/begin``, ``/weights/VERSION`` (chunks, see
        :mod:`trainer.rollout.vllm.nodes.weight_upload`), ``/close``.
        """
        path, _, version = self.path.removeprefix("/").partition("/")
        if self.refused():
            return
        try:
            if path == "weights":
                self.host.take(receive(self.rfile, self._go_on), int(version))
            elif self.elsewhere({"/begin", "/close"}) or (asked := self.body()) is None:
                return
            elif path == "begin":
                self.host.begin(asked)
            else:
                self.host.close()
            self.answer({})
        except Exception as error:
            self.answer({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.BAD_REQUEST)
