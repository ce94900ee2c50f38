"""As much of a W&B server as the real client needs to continue a run and to send rows."""

from __future__ import annotations

import gzip
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeServer:
    """Keeps the history and the summary of one run; ``with`` serves it."""

    def __init__(self) -> None:
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.keeps_summary = True
        """False: summaries arrive late, as those of a killed client do."""
        self.exit_codes: list[int] = []
        self.ids: set[str] = set()
        keeper = self

        class BoundHandler(_Handler):
            server_state = keeper

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), BoundHandler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeServer:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def steps(self, name: str) -> list[int]:
        """The steps of the rows that have the metric ``name``, in the order of their arrival."""
        return [row["training/global_step"] for row in self.history if name in row]

    def answer(self, operation: str, variables: dict[str, Any]) -> dict[str, Any]:
        if operation == "RunResumeStatus":
            return {"model": self._model(variables["name"])}
        if operation == "UpsertBucket":
            self.ids.add(variables["name"])
            return {"upsertBucket": {"bucket": self._bucket(variables["name"]), "inserted": True}}
        if operation == "CreateRunFiles":
            files = [{"name": n, "uploadUrl": f"{self.url}/up/{n}"} for n in variables["files"]]
            return {"createRunFiles": {"runID": "x", "uploadHeaders": [], "files": files}}
        viewer = {"id": "u", "entity": "e", "username": "u", "flags": "{}", "teams": {"edges": []}}
        return {"viewer": viewer, "serverInfo": {}}

    def stream(self, body: dict[str, Any]) -> None:
        """What the client's file stream brings."""
        files = body.get("files") or {}
        history = files.get("wandb-history.jsonl")
        if history:
            rows = [json.loads(line) for line in history["content"]]
            assert history["offset"] == len(self.history), "rows out of order"
            self.history += rows
        if "wandb-summary.json" in files and self.keeps_summary:
            self.summary = json.loads(files["wandb-summary.json"]["content"][-1])
        if body.get("complete"):
            self.exit_codes.append(int(body["exitcode"]))

    def _model(self, name: str) -> dict[str, Any]:
        bucket = None
        if self.history or name in self.ids:
            bucket = self._bucket(name)
        return {"id": "m", "name": "p", "entity": {"id": "e", "name": "e"}, "bucket": bucket}

    def _bucket(self, name: str) -> dict[str, Any]:
        tail = [json.dumps(row) for row in self.history[-1:]]
        project = {"id": "p", "name": "plim", "entity": {"id": "e", "name": "e"}}
        return {
            "id": "b",
            "name": name,
            "displayName": name,
            "description": "",
            "sweepName": None,
            "project": project,
            "config": "{}",
            "summaryMetrics": json.dumps(self.summary),
            "logLineCount": 0,
            "historyLineCount": len(self.history),
            "eventsLineCount": 0,
            "historyTail": json.dumps(tail),
            "eventsTail": "[]",
            "tags": [],
            "notes": None,
            "wandbConfig": '{"t": 1}',
        }


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_state: FakeServer

    def do_POST(self) -> None:
        data = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Content-Encoding") == "gzip":
            data = gzip.decompress(data)
        if self.path == "/graphql":
            query = json.loads(data)
            operation = query.get("operationName") or query["query"]
            answer = self.server_state.answer(operation, query.get("variables") or {})
            self._reply({"data": answer})
        else:
            if self.path.endswith("/file_stream"):
                self.server_state.stream(json.loads(data))
            self._reply({})

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._reply({})

    def _reply(self, value: dict[str, Any]) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""
