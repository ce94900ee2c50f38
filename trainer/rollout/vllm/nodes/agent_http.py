"""HTTP requests to a node agent."""

from __future__ import annotations

import threading
from http import HTTPStatus

from trainer.base.connections import keep_alive
from trainer.launch.rollout_nodes import CORES_HEADER, LIFELINE_PATH, PEER_PATH
from trainer.rollout.vllm.nodes.agent import NodeAgent
from trainer.rollout.vllm.nodes.weight_upload import receive_weights
from trainer.rollout.vllm.server.http import AuthenticatedHandler


def bound_handler(agent: NodeAgent, token: str) -> type[AuthenticatedHandler]:
    """Return the handler of requests to ``agent`` that carry ``token``."""

    class BoundHandler(_AgentHandler):
        authorization = f"Bearer {token}"
        node_agent = agent

    return BoundHandler


class _AgentHandler(AuthenticatedHandler):
    node_agent: NodeAgent

    def handle_expect_100(self) -> bool:
        """Do not reply yet: ``_send_continue`` does, once no server reads the older weights."""
        return True

    def _send_continue(self) -> None:
        self.send_response_only(HTTPStatus.CONTINUE)
        self.end_headers()

    def do_GET(self) -> None:
        """``/status``; ``/lifeline`` and ``/peer``, which last until one of the processes ends."""
        if not self.authorized() or not self.path_in({"/status", LIFELINE_PATH, PEER_PATH}):
            return
        if self.path == "/status":
            self.reply(self.node_agent.status())
            return
        keep_alive(self.connection)
        self.send_response(HTTPStatus.OK)
        self.end_headers()
        if self.path == PEER_PATH:
            self.node_agent.add_peer(self.headers[CORES_HEADER])
            threading.Event().wait()  # the end of this process closes the connection
        self.node_agent.connected.set()
        try:
            self.rfile.read(1)
        except OSError:
            pass
        finally:
            self.node_agent.disconnected.set()

    def do_POST(self) -> None:
        """``/start``, ``/close``, and ``/weights/VERSION`` (chunks of ``weight_upload``)."""
        if not self.authorized():
            return
        try:
            path, _, version = self.path.removeprefix("/").partition("/")
            if path == "weights":
                weights = receive_weights(self.rfile, self._send_continue)
                self.node_agent.update_weights(weights, int(version))
            elif not self.path_in({"/start", "/close"}):
                return
            else:
                body = self.read_json()
                if body is None:
                    return
                if path == "start":
                    self.node_agent.start_servers(body)
                else:
                    self.node_agent.close()
            self.reply({})
        except Exception as error:
            self.reply({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.BAD_REQUEST)
