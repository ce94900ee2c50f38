"""``python -m benchmarks.rollout_vllm``: vLLM in this process and in a server, against the hf
engine.

Tokens per second: the prompts, responses and turns of ``benchmarks.rollout``. ``sync_s``: seconds
of ``update_weights``, each after a generation as in training; ``memcpy_s``: seconds of a copy of
the same bytes from the trainer's tensors into memory that is already allocated, by the same
threads; each is the median of five, after one that doesn't count. ``first_use_s``: how much longer
the first token after an update takes than the same token once more: matrices are packed, and
prompts computed anew.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.generation import (
    Case,
    Generate,
    cases,
    hf,
    load,
    read_prompts,
    take_turns,
    through_engine,
    tokens_per_second,
)
from benchmarks.harness import Report, arguments, timed
from trainer.config import load as load_config
from trainer.models import LoadedModel
from trainer.parallel.weights import whole_weights
from trainer.ranks.world import World
from trainer.rollout import RolloutEngine, eos_ids
from trainer.rollout.vllm.make import make_vllm_engine

TITLE = "vLLM: the same prompts and weights"
TIMES_MEMCPY = 3.0
"""Most seconds of a weight update, in multiples of the copy."""
ROUNDS = 6
"""Measurements of a weight update; the first doesn't count."""


def engine_of(name: str, loaded: LoadedModel, case: Case, longest: int, folder: Path) -> Any:
    """The engine ``name`` as the trainer makes it, started."""
    settings = {
        "data": {"task": "arithmetic"},
        "actor_rollout_ref": {"model": {"path": case.model}, "rollout": {"n": case.n}},
    }
    rollout = load_config(settings).actor_rollout_ref.rollout
    changes = {
        "name": name,
        "prompt_length": longest,
        "response_length": case.limit,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
    }
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=None)  # type: ignore[arg-type]
    ends = eos_ids(loaded.model, loaded.tokenizer)
    engine = make_vllm_engine(
        rollout.model_copy(update=changes), loaded, world, folder / name, eos_ids=ends
    )
    engine.start()
    return engine


def warm_median(seconds: Sequence[float]) -> float:
    """Median of the rounds after the first."""
    return median(seconds[1:])


def memcpy(loaded: LoadedModel) -> float:
    """Seconds of copying all weights once."""
    sources = [p.detach() for p in loaded.model.parameters()]
    targets = [torch.zeros_like(t) for t in sources]

    def copy() -> None:
        for target, source in zip(targets, sources, strict=True):
            target.copy_(source)

    return warm_median([timed(copy) for _ in range(ROUNDS)])


def time_updates(
    engine: RolloutEngine, loaded: LoadedModel, generate: Generate
) -> tuple[float, float]:
    """Seconds of ``update_weights``, and how many more the first token after it takes than the next
    one.
    """
    updates = []
    first_uses = []
    for number in range(ROUNDS):
        weights = whole_weights(loaded.model, sharded=False)
        updates.append(timed(partial(engine.update_weights, weights, number)))
        first = timed(partial(generate, number, 1))
        first_uses.append(first - timed(partial(generate, number, 1)))
    return warm_median(updates), warm_median(first_uses)


def measure(case: Case, report: Report, quick: bool) -> None:
    """Add a row per engine and the checks of speed and weight updates."""
    loaded = load(case.model)
    prompts = read_prompts(loaded, case.prompts)
    nbytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    copy = memcpy(loaded)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways = {"hf": through_engine(hf(loaded), case, prompts)}
        syncs = {"hf": (0.0, 0.0)}
        for name in ("vllm", "vllm_server"):
            engine = engine_of(name, loaded, case, max(map(len, prompts)), Path(folder))
            stack.callback(engine.close)
            ways[name] = through_engine(engine, case, prompts)
            syncs[name] = time_updates(engine, loaded, ways[name])
        measured = take_turns(ways, case)
    speeds = tokens_per_second(measured)
    for name, rounds in measured.items():
        report.add(
            model=case.model,
            way=name,
            responses=case.prompts * case.n,
            response_tokens=fmean(n for _, lengths in rounds for n in lengths),
            tokens_per_s=speeds[name],
            times_hf=speeds[name] / speeds["hf"],
            sync_s=syncs[name][0],
            weights_mb=nbytes / 1e6,
            memcpy_s=copy,
            times_memcpy=syncs[name][0] / copy,
            first_use_s=syncs[name][1],
        )
    faster = speeds["vllm"] / speeds["hf"]
    report.check(
        f"{case.model}: vllm against hf, speed", faster, 0.0 if quick else 1.0, clocked=True
    )
    if case.model != "builtin:tiny":  # 4 MB are copied in a millisecond
        for name in ("vllm", "vllm_server"):
            title = f"{case.model}: {name}, weight update in copies"
            copies = syncs[name][0] / copy
            report.check(title, copies, TIMES_MEMCPY, at_most=True, clocked=True)


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code."""
    args = arguments(__doc__ or "", argv, model={"help": "only this model"})
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(TITLE)
    for case in cases(args.quick, args.model):
        measure(case, report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
