"""A small rank for the launcher's tests: does what RANK_PLAN says, e.g. ``0=wait,1=crash``."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from trainer.base import environment, signals
from trainer.base.errors import UserError
from trainer.launch import report_error
from trainer.tracking.console import make_display

BOUND_S = 300.0


def main(run_dir: Path) -> int:
    if os.environ.get("RANK_SIGNALLED_EARLY"):  # before any handler is there
        os.kill(os.getpid(), signal.SIGUSR2)
    signals.install()
    environment.prepare()
    info = environment.rank_from_environment()
    here = Path(run_dir)
    slurm = sorted(k for k in os.environ if k.startswith(("SLURM_", "PLIMSOLL_SLURM")))
    with (here / f"started_{info.rank}").open("a") as file:
        file.write(f"{os.getpid()} {info} {slurm} {os.environ['OMP_NUM_THREADS']}\n")
    sys.stdout.write(f"rank {info.rank} is here\n")
    sys.stdout.flush()
    plan = dict(part.split("=") for part in os.environ.get("RANK_PLAN", "").split(",") if part)
    try:
        return act(plan.get(str(info.rank), "finish"), here, info)
    except Exception as error:
        code = report_error(error)
        if plan.get(str(info.rank)) == "hang":  # destroying its communicator waits for the peers
            act("deaf", here, info)
        return code


def act(what: str, here: Path, info: environment.RankInfo) -> int:
    deadline = time.monotonic() + BOUND_S
    if what == "finish":
        return 0
    if what in ("crash", "hang"):
        wait_for(here, info)
        raise RuntimeError("the tensor is on fire")
    if what == "wrong":
        wait_for(here, info)
        raise UserError("data.train_files=x: no such file")
    if what == "peer":  # what a rank says when another one has gone
        while not list(here.glob("logs/*/*.error")) and time.monotonic() < deadline:
            time.sleep(0.01)
        raise RuntimeError("Connection closed by peer")
    if what == "segfault":
        wait_for(here, info)
        sys.stdout.write("last words\n")
        sys.stdout.flush()
        os.kill(os.getpid(), signal.SIGSEGV)
    if what == "save":
        while signals.requested() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        (here / f"saved_{info.rank}").write_text(str(signals.requested()))
        return 85
    if what == "leave":  # ends in order, but what it started does not
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({BOUND_S})"])
        (here / f"grandchild_{info.rank}").write_text(str(child.pid))
        return 0
    if what == "deaf":  # stuck in a collective: never reaches its step boundary
        child = subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({BOUND_S})"])
        (here / f"grandchild_{info.rank}").write_text(str(child.pid))
        while time.monotonic() < deadline:
            time.sleep(0.01)
            if signals.requested():
                (here / f"heard_{info.rank}").write_text(str(signals.requested()))
    if what == "show":
        display = make_display(3, 0)
        for step in (1, 2, 3):
            display.update(step, {"critic/score/mean": 0.25 * step})
        display.close()
        return 0
    raise AssertionError(what)


def wait_for(here: Path, info: environment.RankInfo) -> None:
    """Let all ranks start before this one fails."""
    deadline = time.monotonic() + BOUND_S
    while len(list(here.glob("started_*"))) < info.world_size and time.monotonic() < deadline:
        time.sleep(0.01)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
