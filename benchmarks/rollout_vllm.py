"""``python -m benchmarks.rollout_vllm``: vLLM in this process and in a server, beside the hf
engine.

Tokens per second: the prompts, responses and turns of ``benchmarks.rollout``. Hand-over of the
weights: seconds of ``update_weights``, each after a generation as in training, beside those of a
copy of the same bytes from the trainer's tensors into memory that is there already, by the same
threads; each is the median of five, after one that doesn't count. ``first_use_s``: how much longer
the first token after it takes than the same once more: matrices are packed, and prompts computed
anew.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from benchmarks.generating import Case, Generate, hf, load, read_prompts, through_engine
from benchmarks.harness import Report, arguments, timed
from benchmarks.rollout import cases, take_turns, tokens_per_second
from trainer.config import load as load_config
from trainer.models import LoadedModel
from trainer.parallel.weights import whole_weights
from trainer.ranks.world import World
from trainer.rollout import RolloutEngine, eos_ids
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


def middle(found: Sequence[float]) -> float:
    """Median of the rounds after the first."""
    return median(found[1:])


def memcpy(loaded: LoadedModel) -> float:
    """Seconds of copying all weights once."""
    sources = [p.detach() for p in loaded.model.parameters()]
    places = [torch.zeros_like(t) for t in sources]
    pairs = list(zip(places, sources, strict=True))
    return middle(
        [timed(lambda: [place.copy_(source) for place, source in pairs]) for _ in range(ROUNDS)]
    )


def hand_over(
    engine: RolloutEngine, loaded: LoadedModel, generate: Generate
) -> tuple[float, float]:
    """Seconds of ``update_weights``, and how many more the first token after it takes than the next
    one.
    """
    taken, used = [], []
    for number in range(ROUNDS):
        taken.append(
            timed(
                lambda n=number: engine.update_weights(
                    whole_weights(loaded.model, sharded=False), n
                )
            )
        )
        first, second = (timed(lambda n=number: generate(n, 1)) for _ in range(2))
        used.append(first - second)
    return middle(taken), middle(used)


def measure(case: Case, report: Report, quick: bool) -> None:
    loaded = load(case.model)
    prompts = read_prompts(loaded, case.prompts)
    nbytes = sum(p.numel() * p.element_size() for p in loaded.model.parameters())
    copy = memcpy(loaded)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        ways, syncs = {"hf": through_engine(hf(loaded), case, prompts)}, {"hf": (0.0, 0.0)}
        for name in ("vllm", "vllm_server"):
            engine = engine_of(name, loaded, case, max(map(len, prompts)), Path(folder))
            stack.callback(engine.close)
            ways[name] = through_engine(engine, case, prompts)
            syncs[name] = hand_over(engine, loaded, ways[name])
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
            copies, what = syncs[name][0] / copy, f"{case.model}: {name}, hand-over in copies"
            report.check(what, copies, TIMES_MEMCPY, at_most=True, clocked=True)


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__ or "", argv, model={"help": "only this model"})
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(TITLE)
    for case in cases(args.quick, args.model):
        measure(case, report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
