"""``python -m benchmarks.rollout``: tokens per second of the generation engines, against
transformers' plain generate.

The same GSM8K prompts, eight responses to each, the same weights in float32, one process with all
processors; each way is warmed up, then all take turns. Only tokens up to a response's end count. A
figure is the median over the rounds.

Without ``--quick`` two further tables follow: vLLM in this process and as a server against the hf
engine, with the seconds of updating its weights (``benchmarks.rollout_vllm``), and a step whose
reward takes as long as its generation (``benchmarks.streaming``).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from statistics import fmean, median

import torch

from benchmarks.generation import (
    SMOLLM2,
    TINY,
    Case,
    cases,
    hf,
    load,
    plain,
    read_prompts,
    take_turns,
    through_engine,
    tokens_per_second,
)
from benchmarks.harness import Report, arguments

PLAIN = "transformers generate"
BAR = 2.0
"""Least speed of the hf engine, in multiples of plain batched generation."""


def measure(case: Case, report: Report, quick: bool) -> None:
    """Add a row per way and the check of their speeds."""
    loaded = load(case.model)
    prompts = read_prompts(loaded, case.prompts)
    ways = {PLAIN: plain(loaded, case, prompts), "hf": through_engine(hf(loaded), case, prompts)}
    measured = take_turns(ways, case)
    speeds = tokens_per_second(measured)
    for name, rounds in measured.items():
        report.add(
            model=case.model,
            way=name,
            responses=case.prompts * case.n,
            prompt_tokens=fmean(map(len, prompts)),
            response_tokens=fmean(n for _, lengths in rounds for n in lengths),
            limit=case.limit,
            seconds=median(s for s, _ in rounds),
            tokens_per_s=speeds[name],
            times_plain=speeds[name] / speeds[PLAIN],
        )
    bar = 1.0 if quick else BAR
    report.check(
        f"{case.model}: hf against {PLAIN}, speed", speeds["hf"] / speeds[PLAIN], bar, clocked=True
    )


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code."""
    only = {"choices": (TINY, SMOLLM2), "help": "only this model (--quick has the first alone)"}
    args = arguments(__doc__ or "", argv, model=only)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report("Generation: the same prompts and weights")
    for case in cases(args.quick, args.model):
        measure(case, report, args.quick)
    others = [] if args.quick else [*_vllm(args.model), _streaming()]
    return report.finish(args, others=others)


def _vllm(model: str | None) -> list[Report]:
    """vLLM against the hf engine; no table where vLLM is not installed."""
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("vllm is not installed: its rows are left out; type make vllm\n")
        return []
    from benchmarks import rollout_vllm

    report = Report(rollout_vllm.TITLE)
    for case in cases(False, model):
        rollout_vllm.measure(case, report, False)
    return [report]


def _streaming() -> Report:
    """A whole training step; imported late, for it loads DeepSpeed."""
    from benchmarks import streaming

    report = Report(streaming.TITLE)
    streaming.run(report, False)
    return report


if __name__ == "__main__":
    sys.exit(main())
