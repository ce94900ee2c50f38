"""HTTP in front of an :class:`~trainer.rollout.vllm.server.loop.EngineLoop`."""

from __future__ import annotations

import contextlib
import io
import json
import secrets
import socket
import sys
import threading
import time
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.base.json_files import parse_object
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.server.loop import EngineLoop, WrongWeightsError

MAX_BODY_BYTES = 1 << 30
AUTH_TIMEOUT_S = 60.0
"""A connection that has not shown the token by then is closed, however slowly it sends, so that
whoever can reach the port can't occupy threads.
"""
MAX_HEAD_BYTES = 1 << 16
"""Most bytes of a connection before it has shown the token."""
MAX_STRANGERS = 64
"""Connections at once that have not shown the token; one more ends the oldest. A client shows it
within milliseconds.
"""


def start_http_server(loop: EngineLoop, host: str, token: str) -> int:
    """Serve ``loop`` on address ``host`` to requests that carry ``token``; return the port."""

    class BoundHandler(_EngineHandler):
        authorization = f"Bearer {token}"
        engine_loop = loop

    return serve_in_threads(host, BoundHandler)


def serve_in_threads(host: str, handler: type[AuthenticatedHandler]) -> int:
    """Serve with ``handler`` until this process ends; return the port, a free one."""
    server = _Server((host, 0), handler)
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_address[1])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128
    """Every rank of a run may connect at the same moment."""

    def __init__(self, address: tuple[str, int], handler: type[AuthenticatedHandler]) -> None:
        self._strangers: dict[socket.socket, None] = {}
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Handle a new connection in a thread of its own; end the oldest stranger of too many."""
        with self._lock:
            self._strangers[request] = None
            if len(self._strangers) > MAX_STRANGERS:
                oldest = next(iter(self._strangers))
                del self._strangers[oldest]
                with contextlib.suppress(OSError):
                    oldest.shutdown(socket.SHUT_RDWR)  # its thread closes it
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection."""
        self.recognize(request)
        super().shutdown_request(request)

    def recognize(self, connection: Any) -> None:
        """Count a connection no more: it has shown the token, or has ended."""
        with self._lock:
            self._strangers.pop(connection, None)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Print the error, unless it is only that the client has gone."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class _BoundedReader(io.RawIOBase):
    """Reads a connection; with a deadline and up to ``MAX_HEAD_BYTES`` until ``unbound``."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._deadline: float | None = time.monotonic() + AUTH_TIMEOUT_S
        self._left = MAX_HEAD_BYTES

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what has come. Raises TimeoutError after the deadline or too many bytes."""
        if self._deadline is None:
            return self._connection.recv_into(buffer)
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0 or self._left <= 0:
            raise TimeoutError("no token")
        self._connection.settimeout(remaining_s)
        count = self._connection.recv_into(buffer)
        self._left -= count
        return count

    def unbound(self) -> None:
        """From now on wait for any time and read any number of bytes."""
        self._deadline = None
        self._connection.settimeout(None)


class AuthenticatedHandler(BaseHTTPRequestHandler):
    """Replies in JSON to requests that carry the token."""

    protocol_version = "HTTP/1.1"
    authorization = ""
    """The header that a request has to have."""

    def setup(self) -> None:
        """Read the connection through a :class:`_BoundedReader`."""
        super().setup()
        self.rfile.close()
        self._reader = _BoundedReader(self.connection)
        self.rfile = io.BufferedReader(self._reader)

    def authorized(self) -> bool:
        """Whether the request carries the token; if not, that is the reply.

        From then on the connection has no time-out.
        """
        header = self.headers.get("Authorization", "")
        if secrets.compare_digest(header.encode(), self.authorization.encode()):
            self._reader.unbound()
            if isinstance(self.server, _Server):
                self.server.recognize(self.request)
            return True
        self.reply({"error": "no valid token"}, HTTPStatus.UNAUTHORIZED)
        return False

    def path_in(self, paths: set[str]) -> bool:
        """Whether the request's path is one of ``paths``; if not, that is the reply."""
        if self.path in paths:
            return True
        self.reply({"error": f"no {self.path}"}, HTTPStatus.NOT_FOUND)
        return False

    def read_json(self) -> dict[str, Any] | None:
        """Return the request's body; None when it is too large or no JSON object, which is the
        reply.
        """
        text = self.headers.get("Content-Length", "0").strip()
        if not (text.isascii() and text.isdigit()):
            self.reply({"error": "no Content-Length"}, HTTPStatus.BAD_REQUEST)
            return None
        length = int(text[:20])
        if length > MAX_BODY_BYTES:
            self.reply(
                {"error": f"more than {MAX_BODY_BYTES} bytes"}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE
            )
            return None
        body = parse_object(self.rfile.read(length))
        if body is None:
            self.reply({"error": "the body is no JSON object"}, HTTPStatus.BAD_REQUEST)
        return body

    def reply(self, value: Any, status: HTTPStatus = HTTPStatus.OK) -> None:
        """Send ``value`` in JSON."""
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status != HTTPStatus.OK:
            self.send_header("Connection", "close")  # the body may be unread
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing: a line per request would bury the engine's log."""


class _EngineHandler(AuthenticatedHandler):
    engine_loop: EngineLoop

    def do_GET(self) -> None:
        """``/health``: the version of the weights, and for how long the loop has not gone on."""
        if self.authorized() and self.path_in({"/health"}):
            loop = self.engine_loop
            self.reply({"version": loop.version, "stalled_s": loop.stalled_s()})

    def do_POST(self) -> None:
        """``/generate`` (replies with a stream of JSON lines), ``/stop``, ``/weights``."""
        if not self.authorized() or not self.path_in({"/generate", "/stop", "/weights"}):
            return
        body = self.read_json()
        if body is None:
            return
        try:
            if self.path == "/generate":
                self._generate(body)
            elif self.path == "/stop":
                self.engine_loop.stop(body["call"])
                self.reply({})
            else:
                self.engine_loop.load_weights(body["path"], body["table"], body["version"])
                self.reply({})
        except OSError:
            if self.path == "/generate":  # the client has gone, and nobody else wants the rest
                self.engine_loop.stop(body["call"])
            raise
        except WrongWeightsError as error:
            self.reply({"error": str(error)}, HTTPStatus.CONFLICT)
        except Exception as error:
            self.reply({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.BAD_REQUEST)

    def _generate(self, body: dict[str, Any]) -> None:
        requests = [Request(**request) for request in body["requests"]]
        sampling = Sampling(**body["sampling"])
        call = self.engine_loop.generate(
            body["call"], requests, sampling, body["eos_ids"], body["version"]
        )
        self.send_response(HTTPStatus.OK)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in call.lines():
            text = json.dumps(line).encode() + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")
