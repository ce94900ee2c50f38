"""``python -m benchmarks.rollout``: tokens per second of the generation engines beside
transformers' plain generate.

The same GSM8K prompts, eight responses to each, the same weights in float32, one process with all
processors; each way is warmed up, then all take turns. Only tokens up to a response's end count. A
figure is the median over the rounds.

Then, but for ``--quick``, vLLM in this process and as a server beside the hf engine with the
seconds of handing weights over (``benchmarks.rollout_vllm``), and a step whose reward takes as long
as its generation (``benchmarks.streaming``).
"""

from __future__ import annotations

import importlib.util
import os
import sys
from statistics import fmean, median
from time import perf_counter

import torch

from benchmarks.generating import Case, Generate, hf, load, plain, read_prompts, through_engine
from benchmarks.harness import Report, arguments

PLAIN = "transformers generate"
TINY, SMOLLM2 = "builtin:tiny", "builtin:smollm2"
WARM = 4
"""Tokens of the responses that warm a way up."""
BAR = 2.0
"""Speed of the hf engine in plain batched generation's."""


def cases(quick: bool, model: str | None) -> list[Case]:
    everything = (
        [Case(TINY, 4, 8, 48, 2)]
        if quick
        else [Case(TINY, 16, 8, 256, 2), Case(SMOLLM2, 4, 8, 32, 2)]
    )
    return [c for c in everything if model in (None, c.model)]


def take_turns(ways: dict[str, Generate], case: Case) -> dict[str, list[tuple[float, list[int]]]]:
    """Seconds and response lengths of each way and round; every other round in the opposite
    order.
    """
    for generate in ways.values():
        generate(0, WARM)
    found: dict[str, list[tuple[float, list[int]]]] = {name: [] for name in ways}
    for number in range(1, case.rounds + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            began = perf_counter()
            lengths = ways[name](number, case.limit)
            found[name].append((perf_counter() - began, lengths))
    return found


def tokens_per_second(found: dict[str, list[tuple[float, list[int]]]]) -> dict[str, float]:
    """Of each way, the median of its rounds."""
    return {name: median(sum(n) / s for s, n in rounds) for name, rounds in found.items()}


def measure(case: Case, report: Report, quick: bool) -> None:
    loaded = load(case.model)
    prompts = read_prompts(loaded, case.prompts)
    ways = {PLAIN: plain(loaded, case, prompts), "hf": through_engine(hf(loaded), case, prompts)}
    found = take_turns(ways, case)
    speeds = tokens_per_second(found)
    for name, rounds in found.items():
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
    only = {"choices": (TINY, SMOLLM2), "help": "only this model (--quick has the first alone)"}
    args = arguments(__doc__ or "", argv, model=only)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report("Generation: the same prompts and weights")
    for case in cases(args.quick, args.model):
        measure(case, report, args.quick)
    others = [] if args.quick else [*_vllm(args.model), _streaming()]
    return report.finish(args, others=others)


def _vllm(model: str | None) -> list[Report]:
    """vLLM beside the hf engine, and what handing weights over takes; nothing where it is not
    installed.
    """
    if importlib.util.find_spec("vllm") is None:
        sys.stderr.write("vllm is not installed: its rows are left out; type make vllm\n")
        return []
    from benchmarks import rollout_vllm

    report = Report(rollout_vllm.TITLE)
    for case in cases(False, model):
        rollout_vllm.measure(case, report, False)
    return [report]


def _streaming() -> Report:
    from benchmarks import streaming

    report = Report(streaming.TITLE)
    streaming.run(report, False)
    return report


if __name__ == "__main__":
    sys.exit(main())
