"""HTTP in front of a :class:`Loop`, on this machine only."""

from __future__ import annotations

import json
import secrets
import threading
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.loop import Loop, WrongWeightsError
from trainer.rollout.vllm.tally import Request

HOST = "127.0.0.1"
MOST_BYTES = 1 << 30


def listen(loop: Loop, token: str) -> int:
    """Answer requests that carry ``token``, in threads; the port, which the system chose among the free ones."""

    class Bound(_Handler):
        wanted = f"Bearer {token}"
        served = loop

    server = ThreadingHTTPServer((HOST, 0), Bound)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, name="http", daemon=True).start()
    return int(server.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wanted = ""
    served: Loop

    def do_GET(self) -> None:
        """``/health``: the version of the weights, and for how long the engine's thread has not turned."""
        if self._refused() or self._elsewhere({"/health"}):
            return
        self._answer({"version": self.served.version, "stuck_s": self.served.stuck_s()})

    def do_POST(self) -> None:
        """``/generate`` (a stream of JSON lines), ``/stop``, ``/weights``."""
        if self._refused() or self._elsewhere({"/generate", "/stop", "/weights"}):
            return
        length = int(self.headers.get("Content-Length", "0"))
        if length > MOST_BYTES:
            self._answer({"error": f"more than {MOST_BYTES} bytes"}, HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        asked = json.loads(self.rfile.read(length))
        try:
            if self.path == "/generate":
                self._generate(asked)
            elif self.path == "/stop":
                self.served.stop(asked["call"])
                self._answer({})
            else:
                self.served.load(asked["path"], asked["table"], asked["version"])
                self._answer({})
        except OSError:
            if self.path == "/generate":  # who asked is gone: nobody waits for the rest
                self.served.stop(asked["call"])
            raise
        except WrongWeightsError as error:
            self._answer({"error": str(error)}, HTTPStatus.CONFLICT)
        except Exception as error:
            self._answer({"error": f"{type(error).__name__}: {error}"}, HTTPStatus.BAD_REQUEST)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing: a line per request helps nobody."""

    def _generate(self, asked: dict[str, Any]) -> None:
        requests = [Request(**request) for request in asked["requests"]]
        sampling = Sampling(**asked["sampling"])
        call = self.served.generate(asked["call"], requests, sampling, asked["eos_ids"], asked["version"])
        self.send_response(HTTPStatus.OK)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        for line in call.lines():
            text = json.dumps(line).encode() + b"\n"
            self.wfile.write(b"%x\r\n%b\r\n" % (len(text), text))
        self.wfile.write(b"0\r\n\r\n")

    def _refused(self) -> bool:
        if secrets.compare_digest(self.headers.get("Authorization", "").encode(), self.wanted.encode()):
            return False
        self._answer({"error": "no valid token"}, HTTPStatus.UNAUTHORIZED)
        return True

    def _elsewhere(self, known: set[str]) -> bool:
        if self.path in known:
            return False
        self._answer({"error": f"no {self.path}"}, HTTPStatus.NOT_FOUND)
        return True

    def _answer(self, value: dict[str, Any], status: HTTPStatus = HTTPStatus.OK) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        if status != HTTPStatus.OK:
            self.send_header("Connection", "close")  # the body may be unread
            self.close_connection = True
        self.end_headers()
        self.wfile.write(body)
