"""The process of a node agent.

It listens on the interface that reaches rank 0's node, for requests that carry the token of its
address file.
"""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from trainer.base import environment
from trainer.base.connections import Address, new_token
from trainer.base.errors import EXIT_OK, PeerLost, UserError
from trainer.base.rank_info import RolloutTask
from trainer.launch.rollout_nodes import publish_address
from trainer.rollout.vllm.engine.model_folder import make_private
from trainer.rollout.vllm.nodes.agent import NodeAgent, servers_folder
from trainer.rollout.vllm.nodes.agent_http import bound_handler
from trainer.rollout.vllm.server.http import serve_in_threads


def run_node_agent(run_dir: Path, task: RolloutTask, *, timeout_s: float) -> int:
    """Supervise servers as rank 0 requests until it is gone; return the exit code.

    Raises PeerLost when rank 0 has not connected within ``timeout_s``.
    """
    environment.prepare(task.tasks)
    ip = address_towards(task.master_addr)
    token = new_token()
    folder = servers_folder(run_dir, task.node)
    make_private(folder)
    agent = NodeAgent(folder, ip=ip, token=token, tasks=task.tasks)
    port = serve_in_threads(ip, bound_handler(agent, token))
    publish_address(run_dir, task.node, Address(host=ip, port=port, token=token))
    _print(
        f"This node only holds vLLM servers, for the ranks of other nodes; {ip}:{port}. Their "
        f"logs: {folder}"
    )
    if not agent.connected.wait(timeout_s):
        raise PeerLost(
            "rank 0 did not come for this node's servers within "
            f"trainer.join_timeout_s={timeout_s:g}"
        )
    agent.disconnected.wait()
    agent.close()
    _print("Rank 0 has ended, and so have this node's servers.")
    return EXIT_OK


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def address_towards(host: str) -> str:
    """Return the address of this machine from which packets to ``host`` leave. Sends nothing.

    Raises :class:`UserError` when there is no route to ``host``.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
        except OSError as error:
            raise UserError(
                f"this node finds no way to {host}, rank 0's node ({error}): set MASTER_ADDR in "
                "the job's environment to an address that all nodes reach"
            ) from error
        return str(probe.getsockname()[0])
