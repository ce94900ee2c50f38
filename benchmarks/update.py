"""``python -m benchmarks.update``: one optimizer step on real lengths, padded and packed, on the
same model.

Four ways to send the same sequences through the same model (float32, AdamW): padded to the longest
of the step, padded to the longest of each micro-batch (4 sequences a micro-batch in both, in the
shuffled order of a replay buffer), packed to a token budget, and packed to the same budget with
each group's prompt held once. The budget is a number of mean lengths: 6 on the GSM8K trace, where
most groups of 8 then fit whole behind their one prompt, else 4, as many real tokens as a padded
micro-batch. The Search-R1 trace is taken row by row, without groups. Both padded forms use the same
head, on the trained tokens alone, so only the padding differs. Every way runs in a process of its
own, and the processes take turns, so that a slow minute of the machine falls on all of them. Memory
is the process's peak above what it held before the model was made.
"""

from __future__ import annotations

import csv
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import IO

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import numpy as np
import torch

from benchmarks.harness import Report, arguments, shared
from trainer.batching import plan
from trainer.data.batch import Batch

GSM8K, SEARCH = "gsm8k_test_model_solutions", "search_r1_qwen2.5_7b"
WAYS = ("padded to max", "padded to longest", "packed", "packed + shared prompts")
PAIRS = ((WAYS[0], WAYS[2]), (WAYS[1], WAYS[2]), (WAYS[2], WAYS[3]))
"""Which ways are compared, slower first."""
MICRO = 4
LINE_TIMEOUT_S = 900
BARS = (2.3, 1.35, 1.4, 0.72)
"""Speed against both padded forms, further speed by sharing, peak memory against padded to max."""
QUICK_BARS = (1.1, 1.0, 1.15, 0.85)
"""The same for the few sequences of ``--quick``, whose longest is only 1.3 times the mean: 1.14
times the tokens where they are padded to the longest of four.
"""


@dataclass(frozen=True)
class Case:
    """Sequences of one optimizer step: ``groups`` of ``size`` sequences with one prompt, timed
    ``rounds`` times.
    """

    trace: str
    groups: int
    size: int
    budget: int
    """Cap of a packed micro-batch in mean lengths of the step."""
    rounds: int

    @property
    def ways(self) -> tuple[str, ...]:
        return WAYS if self.size > 1 else WAYS[:3]


def cases(quick: bool, trace: str | None) -> list[Case]:
    all_of_them = (
        [Case(GSM8K, 4, 8, 4, 2)] if quick else [Case(GSM8K, 16, 8, 6, 2), Case(SEARCH, 8, 1, 4, 1)]
    )
    return [c for c in all_of_them if trace in (None, c.trace)]


def read_batch(case: Case) -> Batch:
    """Random tokens of the trace's real lengths. Two groups of 4 of the GSM8K trace make a group of
    8.
    """
    with shared(f"data/lengths/{case.trace}.csv").open() as file:
        rows = [(int(r["prompt_len"]), int(r["response_len"])) for r in csv.DictReader(file)]
    starts = np.random.default_rng(0).permutation(len(rows) // case.size)[: case.groups] * case.size
    draw = torch.Generator().manual_seed(0)
    ids, masks, prompts, groups = [], [], [], []
    for number, start in enumerate(starts.tolist()):
        members = rows[start : start + case.size]
        prompt = torch.randint(5, 500, (members[0][0],), generator=draw)
        for _, response in members:
            ids.append(torch.cat([prompt, torch.randint(5, 500, (response,), generator=draw)]))
            masks.append(torch.arange(len(ids[-1])) >= len(prompt))
            prompts.append(len(prompt))
            groups.append(number)
    columns = {"input_ids": ids, "loss_mask": masks}
    return Batch.from_sequences(
        columns, {"prompt_lengths": torch.tensor(prompts), "groups": torch.tensor(groups)}
    )


def micro_batches(batch: Batch, way: str, budget: int) -> list[Batch]:
    if way.startswith("padded"):
        order = np.random.default_rng(1).permutation(len(batch))
        return [
            batch.select(torch.from_numpy(order[i : i + MICRO]))
            for i in range(0, len(batch), MICRO)
        ]
    tokens = max(int(batch.lengths.max()), budget * batch.num_tokens // len(batch))
    stowed = plan(
        batch.lengths.numpy(),
        tokens,
        1,
        "step",
        groups=batch.rows["groups"].numpy(),
        prompt_lengths=batch.rows["prompt_lengths"].numpy(),
        share_prompts="shared" in way,
    )
    return [batch.select(torch.from_numpy(indices)) for indices in stowed.micro_batches[0]]


def memory(key: str) -> float:
    """MiB of ``VmRSS`` (now) or ``VmHWM`` (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


def worker(case: Case, way: str, gradient_file: str) -> None:
    """Warm up, say so, then take one optimizer step for every line on standard input; answer with
    what it took.
    """
    from trainer.models import load_model, pack, pad, token_stats

    torch.set_num_threads(len(os.sched_getaffinity(0)))
    batch = read_batch(case)
    parts, longest = micro_batches(batch, way, case.budget), int(batch.lengths.max())
    load_model(
        "builtin:tiny", dtype=torch.float32, device="cpu"
    )  # what it imports is not the step's memory
    before = memory("VmRSS")
    model = load_model("builtin:tiny", dtype=torch.float32, device="cpu").model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    count = int(batch.columns["loss_mask"].sum())

    def run(part: Batch) -> int:
        if way.startswith("padded"):
            packed = pad(part, to=longest if way == "padded to max" else None)
        else:
            packed = pack(part, share_prompts="shared" in way)
        (-token_stats(model, packed).log_probs.sum() / count).backward()  # type: ignore[no-untyped-call]
        return packed.num_tokens

    run(parts[-1])
    optimizer.zero_grad()
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number, _ in enumerate(sys.stdin):
        start, cpu = perf_counter(), process_time()
        tokens = sum(run(part) for part in parts)
        if number == 0:
            torch.save(
                torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None]),
                gradient_file,
            )
        optimizer.step()
        optimizer.zero_grad()
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu
        sys.stdout.write(
            f"{seconds} {cpu_seconds} {memory('VmHWM') - before} {tokens} {len(parts)}\n"
        )
        sys.stdout.flush()


def step(process: subprocess.Popen[str]) -> list[float]:
    """One step of a worker."""
    pipe_in, pipe_out = process.stdin, process.stdout
    assert pipe_in is not None and pipe_out is not None
    pipe_in.write("step\n")
    pipe_in.flush()
    return [float(x) for x in read_line(pipe_out, process).split()]


def read_line(pipe: IO[str], process: subprocess.Popen[str]) -> str:
    import select

    if not select.select([pipe], [], [], LINE_TIMEOUT_S)[0]:
        raise SystemExit(f"no answer from worker {process.pid} within {LINE_TIMEOUT_S} s")
    line = pipe.readline()
    if not line:
        raise SystemExit(
            f"a worker ended with exit code {process.wait(timeout=60)}; its error stands above"
        )
    return line


def measure(case: Case, report: Report, quick: bool) -> None:
    batch = read_batch(case)
    with tempfile.TemporaryDirectory() as folder:
        files = [f"{folder}/{i}.pt" for i in range(len(case.ways))]
        sizes = [str(x) for x in (case.groups, case.size, case.budget)]
        base = [sys.executable, "-m", "benchmarks.update", "--worker", case.trace, *sizes]
        workers = [
            subprocess.Popen(
                [*base, way, file], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
            for way, file in zip(case.ways, files, strict=True)
        ]
        try:
            for w in workers:
                assert w.stdout is not None
                read_line(w.stdout, w)
            rounds = [[step(w) for w in workers] for _ in range(case.rounds)]
        finally:
            for w in workers:
                w.kill()
                w.communicate()
        gradients = [torch.load(file, weights_only=True) for file in files]
    best = np.array(rounds).min(axis=0)
    wall, cpu = ({way: float(best[i, k]) for i, way in enumerate(case.ways)} for k in (0, 1))
    peak = {way: float(np.array(rounds)[:, i, 2].max()) for i, way in enumerate(case.ways)}
    for i, way in enumerate(case.ways):
        off = float((gradients[i] - gradients[0]).norm() / gradients[0].norm())
        report.add(
            trace=case.trace,
            way=way,
            micro=int(best[i, 4]),
            tokens=int(best[i, 3]),
            seconds=wall[way],
            cpu_seconds=cpu[way],
            real_tokens_per_s=batch.num_tokens / wall[way],
            peak_MiB=peak[way],
            gradient_off=off,
        )
        report.check(f"{case.trace}: gradient of {way}", off, 1e-5, at_most=True)
    # The suite shares the machine with other work: there, processor time is what can be compared.
    time, bars = (cpu, QUICK_BARS) if quick else (wall, BARS)
    report.extra.setdefault("rounds", {})[case.trace] = {
        way: [{"seconds": x[i][0], "cpu_seconds": x[i][1]} for x in rounds]
        for i, way in enumerate(case.ways)
    }
    report.extra.setdefault("cpu_time_ratios", {})[case.trace] = {
        f"{a} / {b}": cpu[a] / cpu[b] for a, b in PAIRS if b in cpu
    }
    for (a, b), bar in zip(PAIRS, bars[:3], strict=True):
        if b in time:
            report.check(
                f"{case.trace}: {b} against {a}, speed", time[a] / time[b], bar, clocked=True
            )
    report.check(
        f"{case.trace}: packed, peak memory", peak["packed"] / peak[WAYS[0]], bars[3], at_most=True
    )


def main(argv: list[str]) -> int:
    if argv[:1] == ["--worker"]:
        groups, size, budget = (int(x) for x in argv[2:5])
        worker(Case(argv[1], groups, size, budget, rounds=0), argv[5], argv[6])
        return 0
    only = {"choices": (GSM8K, SEARCH), "help": "only this trace (--quick has the first alone)"}
    args = arguments(__doc__ or "", argv, trace=only)
    report = Report("One optimizer step on real lengths: the same model, sequences and gradient")
    for case in cases(args.quick, args.trace):
        measure(case, report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
