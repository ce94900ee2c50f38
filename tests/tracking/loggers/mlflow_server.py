"""A server that speaks what MLflow's client sends, and fails as told."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlparse


class MlflowServer:
    """Experiments and runs in memory."""

    def __init__(self) -> None:
        self.experiments: dict[str, str] = {}
        self.runs: dict[str, dict[str, Any]] = {}
        self.files: dict[str, str] = {}
        self.status = 200
        """What every request is answered with, unless 200."""
        self.slow = threading.Event()
        """While it isn't set, requests wait."""
        self.slow.set()
        self.requests = 0
        self.address = ""

    def points(self, name: str) -> list[tuple[int, float]]:
        """Step and value of a metric of the only run."""
        (run,) = self.runs.values()
        return [(m["step"], float(m["value"])) for m in run["metrics"] if m["key"] == name]

    def answer(self, path: str, query: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if path.endswith("experiments/get-by-name"):
            name = query["experiment_name"][0]
            if name not in self.experiments:
                return 404, {"error_code": "RESOURCE_DOES_NOT_EXIST", "message": "no such"}
            return 200, {"experiment": self._experiment(name)}
        if path.endswith("experiments/create"):
            self.experiments[query["name"]] = str(len(self.experiments) + 1)
            return 200, {"experiment_id": self.experiments[query["name"]]}
        if path.endswith("runs/create"):
            number = f"run-{len(self.runs) + 1}"
            self.runs[number] = {
                "name": query.get("run_name"),
                "metrics": [],
                "params": {},
                "states": ["RUNNING"],
                "tags": {tag["key"]: tag["value"] for tag in query.get("tags", [])},
            }
            return 200, {"run": {"info": self._info(number), "data": {}}}
        if path.endswith("runs/get"):
            number = query["run_id"][0]
            return 200, {"run": {"info": self._info(number), "data": {}}}
        run = self.runs[query["run_id"]]
        if path.endswith("runs/log-batch"):
            run["metrics"] += query.get("metrics", [])
            run["params"] |= {item["key"]: item["value"] for item in query.get("params", [])}
            return 200, {}
        if path.endswith("runs/update"):
            run["states"].append(query["status"])
            return 200, {"run_info": self._info(query["run_id"])}
        return 404, {"error_code": "ENDPOINT_NOT_FOUND", "message": path}

    def _experiment(self, name: str) -> dict[str, str]:
        return {"experiment_id": self.experiments[name], "name": name, "lifecycle_stage": "active"}

    def _info(self, number: str) -> dict[str, str]:
        return {
            "run_id": number,
            "run_uuid": number,
            "experiment_id": "1",
            "status": "RUNNING",
            "lifecycle_stage": "active",
            "artifact_uri": f"mlflow-artifacts:/{number}",
        }


@contextmanager
def mlflow_server() -> Iterator[MlflowServer]:
    """A running server on a free port of this machine."""
    server = MlflowServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            parts = urlparse(self.path)
            self._reply(parts.path, parse_qs(parts.query))

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            self._reply(self.path, json.loads(body))

        do_PATCH = do_POST

        def do_PUT(self) -> None:  # a file of a run
            body = self.rfile.read(int(self.headers["Content-Length"]))
            server.files[self.path.partition("artifacts/artifacts/")[2]] = body.decode()
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        def _reply(self, path: str, query: dict[str, Any]) -> None:
            server.requests += 1
            server.slow.wait(120)
            status, answer = server.status, {"error_code": "INTERNAL_ERROR", "message": "told to"}
            if status == 200:
                status, answer = server.answer(path, query)
            data = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *words: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = True
    thread = threading.Thread(target=http.serve_forever, daemon=True)
    thread.start()
    server.address = f"http://127.0.0.1:{http.server_address[1]}"
    try:
        yield server
    finally:
        server.slow.set()
        http.shutdown()
        http.server_close()
