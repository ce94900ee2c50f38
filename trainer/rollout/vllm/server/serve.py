"""``python -m trainer.rollout.vllm.server.serve SPEC``: one vLLM engine behind HTTP.

This is not vLLM's own server, which lets every user of the node call the method by which weights
arrive (``/collective_rpc``), and sends each token of each response on its own. Here every request
has to carry the token from the environment, and one stream carries a whole call. The process ends
with the one that started it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.errors import EXIT_USER, UserError
from trainer.rollout.vllm.engine.core import Core
from trainer.rollout.vllm.engine.isolation import isolated_vllm
from trainer.rollout.vllm.server.http import start_http_server
from trainer.rollout.vllm.server.loop import EngineLoop

TOKEN_VARIABLE = "PLIMSOLL_VLLM_SECRET"  # noqa: S105
"""Environment variable with the token that requests have to carry."""
PR_SET_PDEATHSIG = 1


def main(spec: Path) -> int:
    """Load vLLM and serve it until the process is ended; return the exit code."""

    def load(arguments: dict[str, Any]) -> Core:
        with isolated_vllm(None):
            return Core(arguments)

    return serve(spec, load)


def serve(spec: Path, load: Callable[[dict[str, Any]], Core]) -> int:
    """Serve the engine that ``load`` builds; return the exit code.

    ``spec`` is a JSON file: ``parent`` (process id), ``host`` (address to listen on), ``arguments``
    (of vLLM) and ``ready``, a file that is written with the ``port``, or with what was ``refused``.
    """
    settings = json.loads(spec.read_text())
    _end_with_parent(int(settings["parent"]))
    token = os.environ.pop(TOKEN_VARIABLE)
    ready = Path(settings["ready"])
    try:
        core = load(settings["arguments"])
    except UserError as error:
        atomic.write_json(ready, {"refused": str(error)}, durable=False)
        return EXIT_USER
    loop = EngineLoop(core, max_num_seqs=int(settings["arguments"]["max_num_seqs"]))
    port = start_http_server(loop, settings["host"], token)
    atomic.write_json(ready, {"port": port}, durable=False)
    try:
        loop.run()
    except Exception:
        traceback.print_exc()
    return 1


def _end_with_parent(parent: int) -> None:
    """Let the system kill this process when the thread that started it ends.

    No server outlives its trainer, whatever ends that.
    """
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the trainer is gone")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
