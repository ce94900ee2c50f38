"""HTTP in front of a :class:`Loop`."""

from __future__ import annotations

import json
import secrets
import sys
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.server.loop import Loop, WrongWeightsError

MOST_BYTES = 1 << 30
STRANGER_S = 60.0
"""Who has shown no token by then is hung up on: threads are not for whoever can reach the port."""


def listen(loop: Loop, host: str, token: str) -> int:
    """Answer requests to address ``host`` that carry ``token``; the port."""

    class Bound(_Handler):
        wanted = f"Bearer {token}"
        served = loop

    return serve_in_threads(host, Bound)


def serve_in_threads(host: str, handler: type[Guarded]) -> int:
    """Answer by ``handler`` until this process ends; the port, which the system chose among the
    free ones.
    """
    server = _Server((host, 0), handler)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_address[1])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Every rank of a run may ask at the same moment."""

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Tell what went wrong, unless who asked is just gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Guarded(BaseHTTPRequestHandler):
    """Answers in JSON those who carry the token."""

    protocol_version = "HTTP/1.1"
    wanted = ""
    timeout = STRANGER_S

    def refused(self) -> bool:
        """Whether the token was missing; then that is answered. Who has it may take any time from
        now on.
        """
        if secrets.compare_digest(
            self.headers.get("Authorization", "").encode(), self.wanted.encode()
        ):
            self.connection.settimeout(None)
            return False
        self.answer({"error": "no valid token"}, HTTPStatus.UNAUTHORIZED)
        return True

    def elsewhere(self, known: set[str]) -> bool:
        """Whether there is no such path; then that is answered."""
        if self.path in known:
            return False
        self.answer({"error": f"no {self.path}"}, HTTPStatus.NOT_FOUND)
        return True

    def body(self) -> dict[str, Any] | None:
        """What was sent; None when that is too much, which is answered."""
        length = int(self.headers.get("Content-Length", "0"))
        if length > MOST_BYTES:
            self.answer(
                {"error": f"more than {MOST_BYTES} bytes"}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            )
            return None
        found: dict[str, Any] = json.loads(self.rfile.read(length))
        return found

    def answer(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Say ``value``, in JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status != HTTPStatus.OK:
            self.send_header("Connection", "close")  # the body may be unread
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request helps nobody."""


class _Handler(Guarded):
    served: Loop

    def do_GET(self) -> None:
        """``/health``: the version of the weights, and for how long the engine's thread has not
        turned.
        """
        if self.refused() or self.elsewhere({"/health"}):
            return
        self.answer({"version": self.served.version, "stuck_s": self.served.stuck_s()})

    def do_POST(self) -> None:
        """``/generate`` (a stream of JSON lines), ``/stop``, ``/weights``."""
        if self.refused() or self.elsewhere({"/generate", "/stop", "/weights"}):
            return
        if (asked := self.body()) is None:
            return
        try:
            if self.path == "/generate":
                self._generate(asked)
            elif self.path == "/stop":
                self.served.stop(asked["call"])
                self.answer({})
            else:
                self.served.load(asked["path"], asked["table"], asked["version"])
                self.answer({})
        except OSError:
            if self.path == "/generate":  # who asked is gone: nobody waits for the rest
                self.served.stop(asked["call"])
            raise
        except WrongWeightsError as error:
            self.answer({"error": str(error)}, HTTPStatus.CONFLICT)
        except Exception as error:
            self.answer({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.BAD_REQUEST)

    def _generate(self, asked: dict[str, Any]) -> None:
        requests = [Request(**request) for request in asked["requests"]]
        sampling = Sampling(**asked["sampling"])
        call = self.served.generate(
            asked["call"], requests, sampling, asked["eos_ids"], asked["version"]
        )
        self.send_response(HTTPStatus.OK)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in call.lines():
            text = json.dumps(line).encode() + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")
