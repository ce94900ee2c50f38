"""One way to send a step's sequences through the model, in a process of its own.

``python -m benchmarks.update_worker TRACE GROUPS SIZE BUDGET WAY GRADIENT_FILE`` prints ``ready``
and then takes one optimizer step for every line on standard input, which it answers with what the
step took.
"""

from __future__ import annotations

import csv
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time

import numpy as np
import torch
from torch import nn

from benchmarks.harness import length_trace
from trainer.batching import plan
from trainer.data.batch import Batch
from trainer.models import load_model, pack, pad, token_stats

GSM8K = "gsm8k_test_model_solutions"
SEARCH = "search_r1_qwen2.5_7b"
WAYS = ("padded to max", "padded to longest", "packed", "packed + shared prompts")
MICRO = 4
"""Sequences of a padded micro-batch."""


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
        """The ways to send it; prompts are shared in groups only."""
        return WAYS if self.size > 1 else WAYS[:3]


def read_batch(case: Case) -> Batch:
    """Random tokens of the trace's real lengths. Two groups of 4 of the GSM8K trace make a group of
    8.
    """
    with length_trace(case.trace).open() as file:
        rows = [(int(r["prompt_len"]), int(r["response_len"])) for r in csv.DictReader(file)]
    starts = np.random.default_rng(0).permutation(len(rows) // case.size)[: case.groups] * case.size
    draw = torch.Generator().manual_seed(0)
    ids: list[torch.Tensor] = []
    masks: list[torch.Tensor] = []
    prompts: list[int] = []
    groups: list[int] = []
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
    """The micro-batches of a step; ``budget`` in mean lengths."""
    if way.startswith("padded"):
        order = np.random.default_rng(1).permutation(len(batch))
        return [
            batch.select(torch.from_numpy(order[i : i + MICRO]))
            for i in range(0, len(batch), MICRO)
        ]
    tokens = max(int(batch.lengths.max()), budget * batch.num_tokens // len(batch))
    planned = plan(
        batch.lengths.numpy(),
        tokens,
        1,
        "step",
        groups=batch.rows["groups"].numpy(),
        prompt_lengths=batch.rows["prompt_lengths"].numpy(),
        share_prompts="shared" in way,
    )
    return [batch.select(torch.from_numpy(indices)) for indices in planned.micro_batches[0]]


def memory(key: str) -> float:
    """MiB of ``VmRSS`` (now) or ``VmHWM`` (peak) of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(key))


class Step:
    """One optimizer step of ``case``, sent through the model in the way ``way``."""

    def __init__(self, case: Case, way: str) -> None:
        batch = read_batch(case)
        self._way = way
        self._parts = micro_batches(batch, way, case.budget)
        self._longest = int(batch.lengths.max())
        self._count = int(batch.columns["loss_mask"].sum())
        _load()  # what it imports is not the memory of a step
        self.resting_mib = memory("VmRSS")
        self.model = _load()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-5)
        self.num_micro_batches = len(self._parts)
        self._run(self._parts[-1])
        self.optimizer.zero_grad()

    def gradients(self) -> int:
        """Forward and backward passes of all micro-batches; the tokens that they computed."""
        return sum(self._run(part) for part in self._parts)

    def _run(self, part: Batch) -> int:
        if self._way.startswith("padded"):
            packed = pad(part, to=self._longest if self._way == "padded to max" else None)
        else:
            packed = pack(part, share_prompts="shared" in self._way)
        loss = -token_stats(self.model, packed).log_probs.sum() / self._count
        loss.backward()  # type: ignore[no-untyped-call]
        return packed.num_tokens


def _load() -> nn.Module:
    model: nn.Module = load_model("builtin:tiny", dtype=torch.float32, device="cpu").model
    return model


def main(argv: list[str]) -> None:
    """Answer every line on standard input with seconds, processor seconds, MiB above the memory
    before the model was made, tokens and micro-batches.
    """
    trace, groups, size, budget, way, gradient_file = argv
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    step = Step(Case(trace, int(groups), int(size), int(budget), rounds=0), way)
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    for number, _ in enumerate(sys.stdin):
        start, cpu_start = perf_counter(), process_time()
        tokens = step.gradients()
        if number == 0:
            gradients = [p.grad.flatten() for p in step.model.parameters() if p.grad is not None]
            torch.save(torch.cat(gradients), gradient_file)
        step.optimizer.step()
        step.optimizer.zero_grad()
        seconds, cpu_seconds = perf_counter() - start, process_time() - cpu_start
        mib = memory("VmHWM") - step.resting_mib
        sys.stdout.write(f"{seconds} {cpu_seconds} {mib} {tokens} {step.num_micro_batches}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
