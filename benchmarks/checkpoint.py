"""``python -m benchmarks.checkpoint``: what saving costs a training loop, in ours and in other
ways, on one disk.

A model of SmolLM2-135M's shape with random weights, float32, and its Adam state: 1.61 GB, held by
the trainer's own engine (DeepSpeed, ZeRO stage 0, one rank, threads as ``trainer.launch`` sets
them). An RL step here is a pass without gradients (the rollout's and the old log-probabilities'
place), a forward, a backward and the optimizer step: about a second, much shorter than real ones.
The ways to save take turns, round by round, on the same engine, so that a slow minute of the
machine falls on all of them; what each has written is deleted before the next.

Per way: ``stall_s``, what its calls held up the step in which a save began (the call itself, and
what was left to wait for before the optimizer step); ``longer_s``, how much longer that step took
than those without a save, which includes the cores and the memory it took away; ``total_s``, from
the call until all was written, with nothing else running; ``behind_s``, the same while training
went on; ``slowdown``, steps that ran wholly while it wrote, the copy being over, as multiples of
one without: short steps, for ours whole ones beside a writer that never rests
(``benchmarks.beside``). All are medians over the rounds. ``memcpy`` copies the same tensors into
memory that is already there.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from time import perf_counter
from typing import Any

from trainer.base.environment import process_settings

os.environ.update(
    process_settings(os.environ, 1)
)  # before torch is loaded: the trainer's own thread settings
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.beside import slowdown
from benchmarks.harness import Report, arguments, timed
from benchmarks.savers import PEERS, DcpKeptProcess, Ours, Saver, quiet
from trainer.parallel.engine import Engine, EngineSettings
from trainer.ranks.world import World

ROOT = Path(__file__).resolve().parents[1]
SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SMALL = SMOLLM2 | {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
ROUNDS, QUICK_ROUNDS = 4, 1
BUDGET_S = 420.0
"""No further round begins that would not end by then."""
OURS_PER_ROUND = 2
"""Ours has the most bars to hold, so it is measured more often."""
TOKENS, FEW_TOKENS = 64, 8
STALL_BAR, SLOWDOWN_BAR, DISK_BAR = 0.10, 1.10, 0.70
DD_BLOCK = 8 << 20
Arrays = list[np.ndarray]


class Loop:
    """A training loop on one rank."""

    def __init__(self, shape: dict[str, Any]) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        world = World(
            rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=dist.new_group([0])
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape))
        settings = EngineSettings(
            zero_stage=0, bf16=False, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        self.engine = Engine(model, settings, world)
        self.ids = torch.randint(0, shape["vocab_size"], (1, TOKENS))

    def step(self, before_step: Callable[[], None] = lambda: None, tokens: int = TOKENS) -> None:
        ids = self.ids[:, :tokens]
        with torch.no_grad():
            self.engine.module(ids)
        loss = self.engine.forward(ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.before_step = before_step
        self.engine.step(lr=1e-6, max_norm=1.0)

    def tensors(self) -> Arrays:
        states = self.engine.optimizer.state.values()
        moments = [t for state in states for t in state.values() if t.ndim]
        return [t.detach().numpy() for t in (*self.engine.module.parameters(), *moments)]


class Times:
    """Seconds, by what was measured and the way."""

    def __init__(self) -> None:
        self.all: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))

    def add(self, what: str, way: str, seconds: float) -> None:
        self.all[what][way].append(seconds)

    def median(self, what: str, way: str) -> float:
        return statistics.median(self.all[what][way]) if self.all[what][way] else float("nan")


def in_a_step(loop: Loop, saver: Saver, times: Times, number: int) -> None:
    """A step without a save, one that begins a save, and steps until all is written."""
    times.add("step", saver.name, timed(loop.step))
    held = []
    began = perf_counter()
    held.append(timed(lambda: saver.save(number)))
    loop.step(lambda: held.append(timed(saver.before_step)))
    times.add("save step", saver.name, perf_counter() - began)
    times.add("stall", saver.name, sum(held))
    while saver.busy():
        loop.step()
    saver.wait()
    times.add("behind", saver.name, saver.ended - began)
    if saver.blocks:
        times.add("total", saver.name, saver.ended - began)


def beside(loop: Loop, saver: Saver, times: Times, number: int) -> None:
    """Short steps that lie wholly beside the writing, as multiples of one without."""
    plain = timed(lambda: loop.step(tokens=FEW_TOKENS))
    saver.save(number)
    saver.before_step()
    while saver.busy():
        seconds = timed(lambda: loop.step(tokens=FEW_TOKENS))
        if saver.busy():
            times.add("slowdown", saver.name, seconds / plain)
    saver.wait()


def alone(loop: Loop, saver: Saver, times: Times, number: int) -> None:
    """The same with nothing else running; ``loop`` rests."""
    began = perf_counter()
    saver.save(number)
    saver.wait()
    times.add("total", saver.name, saver.ended - began)


def measure_saver(loop: Loop, saver: Saver, times: Times, number: int) -> None:
    for where, action in (("behind", in_a_step), ("alone", alone), ("beside", beside)):
        if (saver.blocks and action is not in_a_step) or (
            isinstance(saver, Ours) and action is beside
        ):
            continue
        action(loop, saver, times, number)
        if isinstance(saver, Ours):
            numbers = saver.numbers()
            times.add(f"copy {where}", saver.name, numbers["ckpt/copy_s"])
            times.add(f"write {where}", saver.name, numbers["ckpt/write_s"])
        saver.clear()
        settle(saver.folder)
        number += 1


def copy(sources: Arrays, targets: Arrays) -> None:
    for source, target in zip(sources, targets, strict=True):
        np.copyto(target, source)


def one_round(
    loop: Loop, savers: list[Saver], times: Times, turn: int, sources: Arrays, targets: Arrays
) -> None:
    for _ in range(3):
        times.add("total", "memcpy", timed(lambda: copy(sources, targets)))
    times.add("total", "dd", dd(savers[0].folder, sum(s.nbytes for s in sources)))
    for saver in savers:
        for again in range(OURS_PER_ROUND if isinstance(saver, Ours) else 1):
            measure_saver(loop, saver, times, 10 * turn + 4 * again + 1)


def settle(folder: Path) -> None:
    """Until the disk has done with what was deleted, whose pages are gone with it."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def dd(folder: Path, nbytes: int) -> float:
    """Seconds of ``dd conv=fsync`` for so many bytes."""
    target = folder / "dd"
    command = [
        "dd",
        "if=/dev/zero",
        f"of={target}",
        f"bs={DD_BLOCK}",
        f"count={nbytes // DD_BLOCK}",
        "conv=fsync",
    ]
    seconds = timed(lambda: subprocess.run(command, check=True, capture_output=True))
    target.unlink()
    settle(folder)
    return seconds * nbytes / (nbytes // DD_BLOCK * DD_BLOCK)


def measure(args: argparse.Namespace, folder: Path, report: Report) -> None:
    loop = Loop(SMALL if args.quick else SMOLLM2)
    loop.step()
    quiet()
    sources = loop.tensors()
    targets = [source.copy() for source in sources]
    nbytes = sum(source.nbytes for source in sources)
    # A process that loads all of this once more takes longer than the rest of a quick run.
    peers = [kind for kind in PEERS if not (args.quick and kind is DcpKeptProcess)]
    savers: list[Saver] = [
        kind(loop.engine, folder / f"{i}") for i, kind in enumerate((*peers, Ours))
    ]
    times = Times()
    try:
        for saver in savers:  # once for nothing: processes start, host memory is taken
            if not saver.blocks:
                saver.save(0)
                saver.wait()
                saver.clear()
        loop.step()
        began, rounds = perf_counter(), args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS)
        for turn in range(rounds):
            one_round(loop, savers, times, turn, sources, targets)
            if (perf_counter() - began) * (turn + 2) / (turn + 1) > BUDGET_S:
                break
        ours = savers[-1]
        assert isinstance(ours, Ours)
        ratios = slowdown(
            loop.step, folder, nbytes, rounds=1 if args.quick else 3, steps=2 if args.quick else 4
        )
        times.all["slowdown"][ours.name] = ratios
        ours.save(10**6)
        ours.wait()
        report.check(
            "damaged files of a checkpoint read back", len(ours.problems()), 0, at_most=True
        )
    finally:
        for saver in savers:
            saver.close()
    fill(report, times, savers, nbytes)
    hold(report, times, savers, nbytes)


def fill(report: Report, times: Times, savers: list[Saver], nbytes: int) -> None:
    plain = statistics.median(x for way in times.all["step"].values() for x in way)
    for name, synced in (("memcpy", "-"), ("dd conv=fsync", "the file")):
        total = times.median("total", name.split()[0])
        row = {
            "way": name,
            "stall_s": "-",
            "longer_s": "-",
            "total_s": total,
            "behind_s": "-",
            "slowdown": "-",
        }
        report.add(**row, fsync=synced, checksums="-")
    for saver in savers:
        slow = times.median("slowdown", saver.name)
        report.add(
            way=saver.name,
            stall_s=times.median("stall", saver.name),
            longer_s=times.median("save step", saver.name) - plain,
            total_s=times.median("total", saver.name),
            behind_s=times.median("behind", saver.name),
            slowdown="-" if slow != slow else slow,
            fsync=saver.synced,
            checksums=saver.checksums,
        )
    report.extra = {
        "bytes": nbytes,
        "step_s": plain,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "seconds": {what: dict(ways) for what, ways in times.all.items()},
    }


def hold(report: Report, times: Times, savers: list[Saver], nbytes: int) -> None:
    ours, peers = savers[-1].name, [s for s in savers[:-1]]
    stall, total = times.median("stall", ours), times.median("total", ours)
    report.check(
        "stall, in memcpys",
        stall / times.median("total", "memcpy"),
        STALL_BAR,
        at_most=True,
        clocked=True,
    )
    least = min(times.median("stall", p.name) for p in peers)
    report.check("stall, against the peers' best", stall / least, 1.0, at_most=True, clocked=True)
    least = min(times.median("total", p.name) for p in peers if p.synced != "nothing")
    report.check(
        "whole save, against the best of the peers that fsync",
        total / least,
        1.0,
        at_most=True,
        clocked=True,
    )
    report.check(
        "step time while writing",
        times.median("slowdown", ours),
        SLOWDOWN_BAR,
        at_most=True,
        clocked=True,
    )
    disk = times.median("total", "dd") / times.median("write alone", ours)
    report.check("bytes per second, against dd conv=fsync", disk, DISK_BAR, clocked=True)


def main(argv: list[str] | None = None) -> int:
    where = {
        "metavar": "FOLDER",
        "default": str(ROOT / "runs"),
        "help": "on the disk to measure; default: runs",
    }
    rounds = {
        "metavar": "N",
        "type": int,
        "help": f"how often each way takes its turn; default: {ROUNDS}",
    }
    args = arguments(__doc__ or "", argv, dir=where, rounds=rounds)
    Path(args.dir).mkdir(parents=True, exist_ok=True)
    report = Report(
        "Saving 1.61 GB from a training loop" if not args.quick else "Saving a small model"
    )
    folder = Path(tempfile.mkdtemp(dir=args.dir, prefix="checkpoint-benchmark-"))
    try:
        measure(args, folder, report)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        dist.destroy_process_group()
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
