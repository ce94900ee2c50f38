"""``python -m benchmarks.checkpoint``: what saving costs a training loop, with ours and with other
ways to save, on one disk.

A model of SmolLM2-135M's shape with random weights, float32, and its Adam state: 1.61 GB, held by
the trainer's own engine (DeepSpeed, ZeRO stage 0, one rank, threads as ``trainer.launch`` sets
them). An RL step here is a pass without gradients (in place of the rollout and the old log-probs),
a forward, a backward and the optimizer step: about a second, much shorter than real ones.
The ways to save take turns, round by round, on the same engine, so that a slow minute of the
machine hits all of them; what each has written is deleted before the next.

Per way: ``stall_s``, how long its calls held up the step in which a save began (the call itself,
and the wait before the optimizer step); ``longer_s``, how much longer that step took than those
without a save, which includes the cores and the memory that saving took; ``total_s``, from the call
until all was written, with nothing else running; ``behind_s``, the same while training went on;
``slowdown``, the time of steps that ran wholly while it wrote, the copy being over, in multiples of
a step without: short steps, for ours whole ones during a writer that never rests
(``benchmarks.busy_writer``). All are medians over the rounds. ``memcpy`` copies the same tensors
into memory that is already allocated.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from trainer.base.environment import process_settings

# Before torch is loaded: the trainer's own thread settings.
os.environ.update(process_settings(os.environ, 1))
os.environ.setdefault("DS_ACCELERATOR", "cpu")

import torch
import torch.distributed as dist

from benchmarks.busy_writer import slowdown
from benchmarks.checkpoint_loop import SMALL, SMOLLM2, TrainingLoop
from benchmarks.checkpoint_rounds import Times, one_round
from benchmarks.harness import Report, arguments
from benchmarks.savers import PEERS, DcpKeptProcess, Ours, Saver, quiet

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = 4
QUICK_ROUNDS = 1
BUDGET_S = 420.0
"""No further round begins that would not end by then."""
STALL_BAR = 0.10
SLOWDOWN_BAR = 1.10
DISK_BAR = 0.70


def measure(args: argparse.Namespace, folder: Path, report: Report) -> None:
    """Measure all ways to save, below ``folder``; rows and checks go into ``report``."""
    loop = TrainingLoop(SMALL if args.quick else SMOLLM2)
    loop.step()
    quiet()
    # A process that loads all of this once more takes longer than the rest of a quick run.
    peers = [kind for kind in PEERS if not (args.quick and kind is DcpKeptProcess)]
    savers: list[Saver] = [
        kind(loop.engine, folder / f"{i}") for i, kind in enumerate((*peers, Ours))
    ]
    ours = savers[-1]
    assert isinstance(ours, Ours)
    nbytes = sum(source.nbytes for source in loop.tensors())
    times = Times()
    try:
        warm_up(savers)
        loop.step()
        run_rounds(loop, savers, times, args.rounds or (QUICK_ROUNDS if args.quick else ROUNDS))
        rounds, steps = (1, 2) if args.quick else (3, 4)
        ratios = slowdown(loop.step, folder, nbytes, rounds=rounds, steps=steps)
        times.all["slowdown"][ours.name] = ratios
        ours.save(10**6)
        ours.wait()
        damaged = len(ours.problems())
        report.check("damaged files of a checkpoint read back", damaged, 0, at_most=True)
    finally:
        for saver in savers:
            saver.close()
    add_rows(report, times, savers, nbytes)
    hold_to_bars(report, times, savers)


def warm_up(savers: list[Saver]) -> None:
    """Save once with each way that has a background: processes start, host memory is allocated."""
    for saver in savers:
        if not saver.blocks:
            saver.save(0)
            saver.wait()
            saver.clear()


def run_rounds(loop: TrainingLoop, savers: list[Saver], times: Times, rounds: int) -> None:
    """At most ``rounds`` rounds, as many as end within ``BUDGET_S``."""
    sources = loop.tensors()
    targets = [source.copy() for source in sources]
    began = perf_counter()
    for turn in range(rounds):
        one_round(loop, savers, times, turn, sources, targets)
        if (perf_counter() - began) * (turn + 2) / (turn + 1) > BUDGET_S:
            break


def add_rows(report: Report, times: Times, savers: list[Saver], nbytes: int) -> None:
    """Add a row per way, and the seconds of every round."""
    plain = statistics.median(x for way in times.all["step"].values() for x in way)
    for name, synced in (("memcpy", "-"), ("dd conv=fsync", "the file")):
        report.add(
            way=name,
            stall_s="-",
            longer_s="-",
            total_s=times.median("total", name.split()[0]),
            behind_s="-",
            slowdown="-",
            fsync=synced,
            checksums="-",
        )
    for saver in savers:
        ratio = times.median("slowdown", saver.name)
        report.add(
            way=saver.name,
            stall_s=times.median("stall", saver.name),
            longer_s=times.median("save step", saver.name) - plain,
            total_s=times.median("total", saver.name),
            behind_s=times.median("behind", saver.name),
            slowdown="-" if math.isnan(ratio) else ratio,
            fsync=saver.synced,
            checksums=saver.checksums,
        )
    report.extra = {
        "bytes": nbytes,
        "step_s": plain,
        "cores": len(os.sched_getaffinity(0)),
        "threads": torch.get_num_threads(),
        "seconds": {measure: dict(ways) for measure, ways in times.all.items()},
    }


def hold_to_bars(report: Report, times: Times, savers: list[Saver]) -> None:
    """Check ours against the bars and the peers."""
    ours, peers = savers[-1].name, savers[:-1]

    def hold(name: str, value: float, bar: float) -> None:
        report.check(name, value, bar, at_most=True, clocked=True)

    stall = times.median("stall", ours)
    hold("stall, in memcpys", stall / times.median("total", "memcpy"), STALL_BAR)
    least = min(times.median("stall", peer.name) for peer in peers)
    hold("stall, against the peers' best", stall / least, 1.0)
    total = times.median("total", ours)
    least = min(times.median("total", peer.name) for peer in peers if peer.synced != "nothing")
    hold("whole save, against the best of the peers that fsync", total / least, 1.0)
    hold("step time while writing", times.median("slowdown", ours), SLOWDOWN_BAR)
    disk = times.median("total", "dd") / times.median("write alone", ours)
    report.check("bytes per second, against dd conv=fsync", disk, DISK_BAR, clocked=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code."""
    folder_flag = {
        "metavar": "FOLDER",
        "default": str(ROOT / "runs"),
        "help": "on the disk to measure; default: runs",
    }
    rounds_flag = {
        "metavar": "N",
        "type": int,
        "help": f"how often each way takes its turn; default: {ROUNDS}",
    }
    args = arguments(__doc__ or "", argv, dir=folder_flag, rounds=rounds_flag)
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
