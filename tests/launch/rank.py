"""A small rank for the launcher's tests: does what RANK_PLAN says, e.g. ``0=wait,1=crash``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.base import environment, rank_info, signals
from trainer.base.errors import UserError
from trainer.launch import run_rank
from trainer.tracking.console import make_display

BOUND_S = 300.0


def main(run_dir: Path) -> int:
    if os.environ.get("RANK_SIGNALLED_EARLY"):  # before any handler is there
        os.kill(os.getpid(), signal.SIGUSR2)
    signals.install()
    environment.prepare()
    info = rank_info.rank_from_environment()
    folder = Path(run_dir)
    slurm = sorted(k for k in os.environ if k.startswith(("SLURM_", "PLIMSOLL_SLURM")))
    with (folder / f"started_{info.rank}").open("a") as file:
        file.write(f"{os.getpid()} {info} {slurm} {os.environ['OMP_NUM_THREADS']}\n")
    sys.stdout.write(f"rank {info.rank} is here\n")
    sys.stdout.flush()
    plan = dict(part.split("=") for part in os.environ.get("RANK_PLAN", "").split(",") if part)
    action = plan.get(str(info.rank), "finish")
    if action == "leave early":  # as a library that ends the process behind Python's back
        return 0
    code = run_rank(folder, lambda: act(action, folder, info))
    if action == "hang":  # destroying its communicator waits for the peers
        act("deaf", folder, info)
    return code


def act(action: str, folder: Path, info: rank_info.RankInfo) -> int:
    deadline = time.monotonic() + BOUND_S
    if action == "finish":
        return 0
    if action in ("crash", "hang"):
        wait_for(folder, info)
        raise RuntimeError("the tensor is on fire")
    if action == "wrong":
        wait_for(folder, info)
        raise UserError("data.train_files=x: no such file")
    if action == "wrong late":  # a slower rank, told to stop when another crashed of the same
        while signals.requested() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        raise UserError("data.train_files=x: no such file")
    if action == "peer":  # the error of a rank whose peer has gone
        while not crashed(folder) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    if action == "exit":
        os._exit(0)
    if action == "segfault":
        wait_for(folder, info)
        sys.stdout.write("last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if action == "save":
        while signals.requested() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        (folder / f"saved_{info.rank}").write_text(str(signals.requested()))
        return 85
    if action == "leave":  # ends in order, but what it started does not
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({BOUND_S})"])
        (folder / f"grandchild_{info.rank}").write_text(str(child.pid))
        return 0
    if action == "deaf":  # stuck in a collective: never reaches its step boundary
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({BOUND_S})"])
        (folder / f"grandchild_{info.rank}").write_text(str(child.pid))
        while time.monotonic() < deadline:
            time.sleep(0.01)
            if signals.requested():
                (folder / f"heard_{info.rank}").write_text(str(signals.requested()))
    if action == "show":
        display = make_display(3, 0)
        for step in (1, 2, 3):
            display.update(step, {"critic/score/mean": 0.25 * step})
        display.close()
        return 0
    raise AssertionError(action)


def crashed(folder: Path) -> bool:
    return any("crash" in path.read_text() for path in folder.glob("logs/*/*.end.json"))


def wait_for(folder: Path, info: rank_info.RankInfo) -> None:
    """Let all ranks start before this one fails."""
    deadline = time.monotonic() + BOUND_S
    while len(list(folder.glob("started_*"))) < info.world_size and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
