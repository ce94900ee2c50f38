"""``python -m benchmarks.update``: one optimizer step on real lengths, padded and packed, with the
same model.

Four ways to send the same sequences through the same model (float32, AdamW): padded to the longest
of the step, padded to the longest of each micro-batch (4 sequences a micro-batch in both, in the
shuffled order of a replay buffer), packed to a token budget, and packed to the same budget with
each group's prompt held once. The budget is a number of mean lengths: 6 on the GSM8K trace, where
most groups of 8 then fit whole behind their one prompt, else 4, as many real tokens as a padded
micro-batch. The Search-R1 trace is taken row by row, without groups. Both padded forms use the same
head, on the trained tokens alone, so only the padding differs. Every way runs in a process of its
own, and the processes take turns, so that a slow minute of the machine hits all of them. Memory
is the process's peak above what it held before the model was made.
"""

from __future__ import annotations

import select
import subprocess
import sys
import tempfile
from typing import IO, NamedTuple

import numpy as np
import torch

from benchmarks.harness import Report, arguments
from benchmarks.update_worker import GSM8K, SEARCH, WAYS, Case, read_batch

PAIRS = ((WAYS[0], WAYS[2]), (WAYS[1], WAYS[2]), (WAYS[2], WAYS[3]))
"""Which ways are compared, slower first."""
LINE_TIMEOUT_S = 900
BARS = (2.3, 1.35, 1.4, 0.72)
"""Speed against both padded forms, further speed by sharing, peak memory against padded to max."""
QUICK_BARS = (1.1, 1.0, 1.15, 0.85)
"""The same for the few sequences of ``--quick``, whose longest is only 1.3 times the mean: 1.14
times the tokens where they are padded to the longest of four.
"""


def cases(quick: bool, trace: str | None) -> list[Case]:
    """The cases of the table, or of ``--quick``; only those of ``trace`` unless it is None."""
    all_of_them = (
        [Case(GSM8K, 4, 8, 4, 2)] if quick else [Case(GSM8K, 16, 8, 6, 2), Case(SEARCH, 8, 1, 4, 1)]
    )
    return [c for c in all_of_them if trace in (None, c.trace)]


class Answer(NamedTuple):
    """What one step of a worker took."""

    seconds: float
    cpu_seconds: float
    peak_mib: float
    tokens: float
    micro_batches: float


def step(process: subprocess.Popen[str]) -> Answer:
    """One step of a worker."""
    pipe_in, pipe_out = process.stdin, process.stdout
    assert pipe_in is not None and pipe_out is not None
    pipe_in.write("step\n")
    pipe_in.flush()
    return Answer(*(float(x) for x in read_line(pipe_out, process).split()))


def read_line(pipe: IO[str], process: subprocess.Popen[str]) -> str:
    """A worker's next line; ends the program with a message when none comes."""
    if not select.select([pipe], [], [], LINE_TIMEOUT_S)[0]:
        raise SystemExit(f"no answer from worker {process.pid} within {LINE_TIMEOUT_S} s")
    line = pipe.readline()
    if not line:
        raise SystemExit(
            f"a worker ended with exit code {process.wait(timeout=60)}; its error is printed above"
        )
    return line


def measure(case: Case, report: Report, quick: bool) -> None:
    """Add a row per way, and the checks of gradients, speed and memory."""
    rounds, gradients = run_workers(case)
    tokens = read_batch(case).num_tokens
    best: dict[str, Answer] = {}
    for i, way in enumerate(case.ways):
        values = np.array([answers[i] for answers in rounds])
        best[way] = Answer(*values.min(axis=0))._replace(peak_mib=float(values[:, 2].max()))
        off = float((gradients[i] - gradients[0]).norm() / gradients[0].norm())
        report.add(
            trace=case.trace,
            way=way,
            micro=int(best[way].micro_batches),
            tokens=int(best[way].tokens),
            seconds=best[way].seconds,
            cpu_seconds=best[way].cpu_seconds,
            real_tokens_per_s=tokens / best[way].seconds,
            peak_MiB=best[way].peak_mib,
            gradient_off=off,
        )
        report.check(f"{case.trace}: gradient of {way}", off, 1e-5, at_most=True)
    report.extra.setdefault("rounds", {})[case.trace] = {
        way: [{"seconds": r[i].seconds, "cpu_seconds": r[i].cpu_seconds} for r in rounds]
        for i, way in enumerate(case.ways)
    }
    hold_to_bars(case, report, best, quick)


def run_workers(case: Case) -> tuple[list[list[Answer]], list[torch.Tensor]]:
    """The answers of each round, by way, and the gradient of each way."""
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{i}.pt" for i in range(len(case.ways))]
        sizes = [str(x) for x in (case.groups, case.size, case.budget)]
        base = [sys.executable, "-m", "benchmarks.update_worker", case.trace, *sizes]
        workers = [
            subprocess.Popen(
                [*base, way, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for way, file in zip(case.ways, files, strict=True)
        ]
        try:
            for worker in workers:
                assert worker.stdout is not None
                read_line(worker.stdout, worker)
            rounds = [[step(worker) for worker in workers] for _ in range(case.rounds)]
        finally:
            for worker in workers:
                worker.kill()
                worker.communicate()
        return rounds, [torch.load(file, weights_only=True) for file in files]


def hold_to_bars(case: Case, report: Report, best: dict[str, Answer], quick: bool) -> None:
    """Check speed and memory of the ways against each other."""
    wall = {way: answer.seconds for way, answer in best.items()}
    cpu = {way: answer.cpu_seconds for way, answer in best.items()}
    # The test suite shares the machine with other work: there only processor time compares.
    time, bars = (cpu, QUICK_BARS) if quick else (wall, BARS)
    pairs = [(a, b, bar) for (a, b), bar in zip(PAIRS, bars[:3], strict=True) if b in best]
    report.extra.setdefault("cpu_time_ratios", {})[case.trace] = {
        f"{a} / {b}": cpu[a] / cpu[b] for a, b, _ in pairs
    }
    for a, b, bar in pairs:
        name = f"{case.trace}: {b} against {a}, speed"
        report.check(name, time[a] / time[b], bar, clocked=True)
    peak = best["packed"].peak_mib / best[WAYS[0]].peak_mib
    report.check(f"{case.trace}: packed, peak memory", peak, bars[3], at_most=True)


def main(argv: list[str]) -> int:
    """The command line; the exit code."""
    only = {"choices": (GSM8K, SEARCH), "help": "only this trace (--quick has the first alone)"}
    args = arguments(__doc__ or "", argv, trace=only)
    report = Report("One optimizer step on real lengths: the same model, sequences and gradient")
    for case in cases(args.quick, args.trace):
        measure(case, report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
