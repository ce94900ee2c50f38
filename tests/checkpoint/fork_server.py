"""A process that has torch and DeepSpeed loaded and forks ranks: they start in a tenth of a second.

Tests use ``ForkServer`` and ``Ranks``. Run as a module this is the server: a JSON line with target,
size, args and log goes in, the process ids come out.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
HANGS_S = 250.0
"""A rank that runs for so long hangs, however busy the machine is."""

LAZY_IMPORTS = (
    "deepspeed.comm.mori",
    "deepspeed.module_inject.auto_ep_layer",
    "deepspeed.ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "deepspeed.runtime.zero.stage3",
    "deepspeed.runtime.zero.stage_1_and_2",
    "deepspeed.runtime.bf16_optimizer",
    "torch._dynamo",
    "torch.distributed.optim",
    "torch.utils.cpp_extension",
    "distutils.core",
    "s3fs",
    "tests.checkpoint.rank_programs",
    "tests.checkpoint.crash_attempt",
)
"""What DeepSpeed and fsspec import only when they use it, which takes seconds; and the programs."""


class ForkServer:
    """The test's end of the server process."""

    def __init__(self) -> None:
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OMP_NUM_THREADS": "1",
            "DS_ACCELERATOR": "cpu",
        }
        env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env.get('PATH', '')}"
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.fork_server"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=env,
            text=True,
            cwd=ROOT,
        )

    def start(
        self, target: str, size: int, args: list[Any], log: Path, env: dict[str, str] | None = None
    ) -> Ranks:
        """Start ``size`` ranks that run ``target`` (``module:function``)."""
        assert self._process.stdin is not None and self._process.stdout is not None
        request = {"target": target, "size": size, "args": args, "log": str(log), "env": env or {}}
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        pids = json.loads(self._process.stdout.readline())
        return Ranks(pids, log)

    def close(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        # What this process has forked may hold the other end of the pipe open.
        self._process.terminate()
        self._process.wait(100)


class Ranks:
    """Ranks of one world; each leaves 0 or a traceback in ``<log>.<rank>.exit`` unless killed."""

    def __init__(self, pids: list[int], log: Path) -> None:
        self.pids = pids
        self.log = log

    def alive(self) -> bool:
        return any(_alive(pid) for pid in self.pids)

    def kill(self, *, writers: bool = True) -> None:
        """kill -9 of all ranks at once, with or without the writer processes (their group)."""
        if writers:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pids[0], signal.SIGKILL)
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.wait_until_gone(60)

    def finish(self, timeout_s: float = HANGS_S + 50) -> None:
        """Wait until every rank has succeeded; raises with the traceback of one that has not."""
        if not self.wait_until_gone(timeout_s):
            self.kill()
            raise TimeoutError(f"ranks {self.pids} hung; log: {self.output()}")
        for rank in range(len(self.pids)):
            exit_file = Path(f"{self.log}.{rank}.exit")
            text = exit_file.read_text() if exit_file.exists() else "killed"
            if text != "0":
                raise AssertionError(f"rank {rank}: {text}\n{self.output()}")

    def output(self) -> str:
        return self.log.read_text()[-4000:] if self.log.exists() else ""

    def wait_until_gone(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while self.alive():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


def _alive(pid: int) -> bool:
    """Whether the process isn't reaped yet.

    The kernel reaps it when its last thread has let go of files and locks.
    """
    return Path(f"/proc/{pid}").exists()


def _run_rank(request: dict[str, Any], rank: int, group: int) -> None:
    """The life of a forked rank; never returns."""
    os.setpgid(0, group)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    fd = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(fd, 1)
    os.dup2(fd, 2)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.environ.update(request["env"])
    # A hang leaves every thread's stack in the log.
    faulthandler.dump_traceback_later(HANGS_S, exit=True)
    exit_file = Path(f"{request['log']}.{rank}.exit")
    code = 0
    try:
        module, name = request["target"].split(":")
        getattr(importlib.import_module(module), name)(rank, request["size"], *request["args"])
        exit_file.write_text("0")
    except BaseException:
        exit_file.write_text(traceback.format_exc())
        code = 1
    finally:
        sys.stdout.flush()
        os._exit(code)


def main() -> None:
    import torch

    for name in LAZY_IMPORTS:
        importlib.import_module(name)
    _ = sys.modules["deepspeed.ops"].__compatible_ops__  # tries compilers: once, not in every rank
    torch.set_num_threads(1)
    # A garbage collection in a rank would touch, and so copy, every page of what is loaded here.
    gc.freeze()
    # The kernel reaps: the test sees a dead rank disappear at once.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        request = json.loads(line)
        pids: list[int] = []
        for rank in range(request["size"]):
            pid = os.fork()
            if pid == 0:
                _run_rank(request, rank, pids[0] if pids else 0)
            pids.append(pid)
            # The group must exist before the next rank joins it.
            with contextlib.suppress(OSError):
                os.setpgid(pid, pids[0])
        sys.__stdout__.write(json.dumps(pids) + "\n")
        sys.__stdout__.flush()


if __name__ == "__main__":
    main()
