"""``python -m trainer.rollout.vllm.server.serve SPEC``: one vLLM engine in a process of its own,
asked over HTTP.

Not vLLM's own server: that leaves the door by which weights arrive (``/collective_rpc``) open to
every user of the node, and sends each token of each response on its own. Here every request has to
carry the token from the environment, and one stream carries a whole call. The process ends with the
one that started it.
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

from trainer.base.errors import EXIT_USER, UserError
from trainer.rollout.vllm.engine import isolation as surroundings
from trainer.rollout.vllm.engine.core import Core
from trainer.rollout.vllm.server.http import listen
from trainer.rollout.vllm.server.loop import Loop

SECRET = "PLIMSOLL_VLLM_SECRET"  # noqa: S105
"""Environment variable with the token that requests carry."""
PR_SET_PDEATHSIG = 1


def main(spec: Path) -> int:
    """Load vLLM and serve it until the process is ended."""

    def load(arguments: dict[str, Any]) -> Core:
        with surroundings.guest(None):
            return Core(arguments)

    return serve(spec, load)


def serve(spec: Path, load: Callable[[dict[str, Any]], Core]) -> int:
    """Listen, tell the file ``ready`` of ``spec`` where, and do what is asked with what ``load``
    gives.
    """
    wanted = json.loads(spec.read_text())
    _die_with(int(wanted["parent"]))
    token = os.environ.pop(SECRET)
    ready = Path(wanted["ready"])
    try:
        core = load(wanted["arguments"])
    except UserError as error:
        _write(ready, {"refused": str(error)})
        return EXIT_USER
    loop = Loop(core, rows=int(wanted["arguments"]["max_num_seqs"]))
    _write(ready, {"port": listen(loop, wanted["host"], token)})
    try:
        loop.run()
    except Exception:
        traceback.print_exc()
    return 1


def _die_with(parent: int) -> None:
    """End when the thread that started this process does: no server outlives its trainer."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit("the trainer is gone")


def _write(path: Path, value: dict[str, object]) -> None:
    temp = path.with_suffix(".tmp")
    temp.touch(mode=0o600)
    temp.write_text(json.dumps(value))
    temp.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
