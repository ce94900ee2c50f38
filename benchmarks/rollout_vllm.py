"""``python -m benchmarks.rollout_vllm``: vLLM in this process and in a server, beside the hf engine.

Tokens per second: the prompts, responses and turns of ``benchmarks.rollout``. Hand-over of the weights: seconds of
``update_weights`` beside those of a copy of the same bytes from the trainer's tensors into memory that is there
already, by the same threads; each is the median of five, after one that doesn't count.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from time import perf_counter
from typing import Any

import torch

from benchmarks.generating import Case, hf, load, read_prompts, through_engine
from benchmarks.harness import Report, arguments
from benchmarks.rollout import cases, take_turns, tokens_per_second
from trainer.config import load as load_config
from trainer.models import LoadedModel
from trainer.parallel.weights import whole_weights
from trainer.parallel.world import World
from trainer.rollout import eos_ids
from trainer.rollout.vllm.make import make_vllm_engine

TITLE = "vLLM: the same prompts and weights"
TIMES_MEMCPY = 3.0
ROUNDS = 6


def engine_of(name: str, loaded: LoadedModel, case: Case, longest: int, folder: Path) -> Any:
    """The engine ``name`` as the trainer makes it, started."""
    settings = {
        "data": {"task": "arithmetic"},
        "actor_rollout_ref": {"model": {"path": case.model}, "rollout": {"n": case.n}},
    }
    rollout = load_config(settings).actor_rollout_ref.rollout
    changes = {
        "name": name, "prompt_length": longest, "response_length": case.limit, "max_num_seqs": 256,
        "max_num_batched_tokens": 4096,
    }  # fmt: skip
    world = World(rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=None)  # type: ignore[arg-type]
    ends = eos_ids(loaded.model, loaded.tokenizer)
    engine = make_vllm_engine(rollout.model_copy(update=changes), loaded, world, folder / name, eos_ids=ends)
    engine.start()
    return engine


def seconds(what: Callable[[int], object]) -> float:
    """Median of the rounds after the first."""
    found = []
    for number in range(ROUNDS):
        began = perf_counter()
        what(number)
        found.append(perf_counter() - began)
    return median(found[1:])


def memcpy(loaded: LoadedModel) -> float:
    """Seconds of copying all weights once."""
    sources = [p.detach() for p in loaded.model.parameters()]
    places = [torch.zeros_like(t) for t in sources]
    return seconds(lambda _: [place.copy_(source) for place, source in zip(places, sources, strict=True)])


def measure(case: Case, report: Report, quick: bool) -> None:
    loaded = load(case.model)
    prompts = read_prompts(loaded, case.prompts)
    nbytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    copy = memcpy(loaded)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways, syncs = {"hf": through_engine(hf(loaded), case, prompts)}, {"hf": 0.0}
        for name in ("vllm", "vllm_server"):
            engine = engine_of(name, loaded, case, max(map(len, prompts)), Path(folder))
            stack.callback(engine.close)
            syncs[name] = seconds(lambda n, e=engine: e.update_weights(whole_weights(loaded.model, sharded=False), n))
            ways[name] = through_engine(engine, case, prompts)
        found = take_turns(ways, case)
    speeds = tokens_per_second(found)
    for name, rounds in found.items():
        report.add(
            model=case.model,
            way=name,
            responses=case.prompts * case.n,
            response_tokens=fmean(n for _, lengths in rounds for n in lengths),
            tokens_per_s=speeds[name],
            times_hf=speeds[name] / speeds["hf"],
            sync_s=syncs[name],
            weights_mb=nbytes / 1e6,
            memcpy_s=copy,
            times_memcpy=syncs[name] / copy,
        )
    report.check(f"{case.model}: vllm against hf, speed", speeds["vllm"] / speeds["hf"], 0.0 if quick else 1.0)
    if case.model != "builtin:tiny":  # 4 MB are copied in a millisecond
        for name in ("vllm", "vllm_server"):
            report.check(f"{case.model}: {name}, hand-over in copies", syncs[name] / copy, TIMES_MEMCPY, at_most=True)


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__ or "", argv, model={"help": "only this model"})
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(TITLE)
    for case in cases(args.quick, args.model):
        measure(case, report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
