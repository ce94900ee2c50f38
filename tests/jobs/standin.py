"""A rank that keeps the trainer's protocol and trains nothing: steps, a checkpoint, USR2 or TERM ->
saved, code 85.

Its "weights" are a hash over all steps, so that an interrupted run equals an uninterrupted one only
if no step was lost or repeated. Settings come from the config: ``trainer.total_training_steps``,
and the experiment's name says what to do.

With the name ``together`` its ranks meet and exchange a number in every step, as real ones do: a
rank whose peer is gone then fails with the error of torch's gloo.

``STANDIN_HOLD_AFTER``: after so many steps of an attempt it makes no more until it is asked to
stop, or the file ``go`` lies in its run folder: what interrupts it comes in time, however busy the
machine is.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import yaml

from trainer.base import rank_records
from trainer.base.errors import UserError
from trainer.base.rank_info import rank_from_environment
from trainer.launch import run_rank

STEP_S = float(os.environ.get("STANDIN_STEP_S", "0.05"))
HOLD_AFTER = int(os.environ.get("STANDIN_HOLD_AFTER", str(10**9)))
HOLD_S = 400.0


def main(run: Path) -> int:
    return run_rank(run, lambda: train(run))


def train(run: Path) -> int:
    signals: list[str] = []
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, lambda n, f: signals.append(signal.Signals(n).name[3:]))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGUSR2, signal.SIGTERM))
    config = yaml.safe_load((run / "config.yaml").read_text())
    info = rank_from_environment()
    rank = info.rank
    attempt = int(os.environ.get("PLIMSOLL_ATTEMPT", "1"))
    name = str(config["trainer"]["experiment_name"])
    print(
        f"rank {rank} of {info.world_size} attempt {attempt} "
        f"gpus {os.environ.get('CUDA_VISIBLE_DEVICES')} "
        f"master {os.environ.get('MASTER_ADDR')}",
        flush=True,
    )
    if name.startswith("crash"):
        raise RuntimeError("this job was told to crash")
    if name == "wrong":
        raise UserError("trainer.experiment_name=wrong: name it otherwise")
    if name == "segfault" and attempt == 1:
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "exit":
        os._exit(0)
    stops = signals_of_all_ranks(run, signals) if name == "together" else lambda: bool(signals)
    total = int(config["trainer"]["total_training_steps"] or 2)
    saved = run / f"state_{rank}.json"
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "weights": ""}
    hold = state["step"] + HOLD_AFTER
    deadline = time.monotonic() + HOLD_S
    while state["step"] < total and not stops():
        time.sleep(STEP_S)
        if state["step"] >= hold and not (run / "go").exists():
            if time.monotonic() > deadline:
                raise TimeoutError(f"held for {HOLD_S} s")
            continue
        state["step"] += 1
        state["weights"] = hashlib.sha256(f"{state['weights']}{state['step']}".encode()).hexdigest()
        if rank == 0:
            with (run / "metrics.jsonl").open("a") as file:
                file.write(
                    json.dumps({"step": state["step"], "critic/score/mean": state["step"] / total})
                    + "\n"
                )
        if state["step"] % 10 == 0:
            _save(saved, state)
    # As in trainer.base.signals: a late signal must not kill a rank that has saved.
    for number in (signal.SIGUSR2, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    _save(saved, state)
    if state["step"] >= total:
        return 0
    folder = rank_records.attempt_folder(run)
    assert folder is not None
    step = state["step"]
    stop = signals[0] if signals else None
    rank_records.write_end(folder, rank, kind="stopped", exit_code=85, step=step, stop=stop)
    return 85


def signals_of_all_ranks(run: Path, signals: list[str]) -> Callable[[], bool]:
    """Meet the other ranks; the function tells whether any of them has got a signal."""
    from trainer.ranks.world import join

    world = join(rank_from_environment(), device="cpu", run_dir=run, meet_s=400, timeout_s=400)
    return lambda: bool(world.any(int(bool(signals))))


def _save(path: Path, state: dict) -> None:
    temp = path.with_suffix(".new")
    temp.write_text(json.dumps(state))
    temp.replace(path)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
