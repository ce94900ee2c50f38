"""``python -m tests.system.vllm_rank FOLDER``: a rank with vLLM in its process.

First with an engine of its own, then with one that two ranks share.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.system.vllm_runs import (
    RESPONSE,
    engine_over,
    ids,
    largest_difference,
    perturb,
    prompts,
    sync,
    tiny,
)
from trainer.base import environment
from trainer.base.rank_info import rank_from_environment
from trainer.models import LoadedModel
from trainer.ranks.world import World, join, leave
from trainer.rollout import EngineFailed, Sampling
from trainer.rollout.log_prob_check import check_log_probs

SAMPLING = Sampling(max_response_length=RESPONSE, temperature=0.7)


def main(folder: Path) -> None:
    info = rank_from_environment()
    world = join(info, device="cpu", run_dir=folder, meet_s=500.0, timeout_s=500.0)
    loaded = tiny()
    responses = {}
    for size in (1, 2):
        engine = engine_over(
            loaded, folder, world=world, name="vllm", tensor_model_parallel_size=size
        )
        check_log_probs(engine, loaded.model, vocabulary=512, dtype=torch.float32)
        groups = prompts()[world.rank :: world.size]  # the ranks have different numbers
        drawn = ids(list(engine.generate(groups, SAMPLING, seed=3)))
        responses[size] = [drawn[k] for k in sorted(drawn)]
        if size > 1:
            generate_unequally(engine, loaded, world, responses[size])
        engine.close()
        gc.collect()
        world.barrier()  # the trainer's process groups still work
        assert dist.is_initialized()
    (folder / f"rank_{world.rank}.json").write_text(json.dumps(responses))
    leave()


def generate_unequally(engine: Any, loaded: LoadedModel, world: World, before: list[Any]) -> None:
    """Let the ranks of a shared engine do different things; they have to meet again after each."""
    groups = prompts()[world.rank :: world.size]
    assert list(engine.generate(groups if world.rank else [], SAMPLING, seed=3)) == [] or world.rank
    world.barrier()
    under_way = engine.generate(groups, SAMPLING, seed=3)
    if world.rank:
        assert ids(list(under_way))
        assert ids(list(engine.generate(groups, SAMPLING, seed=3)))
    else:
        first = next(iter(under_way))
        left = under_way.stop()
        assert sorted(f.number for f in [first, *left]) == list(range(len(groups)))
        list(engine.generate([], SAMPLING, seed=3))
    assert engine.core.num_unfinished == 0
    perturb(loaded)
    sync(engine, loaded, 2)
    again = list(engine.generate(groups, SAMPLING, seed=3))
    assert largest_difference(loaded, groups, again, temperature=0.7) < 1e-4
    assert [ids(again)[k] for k in range(len(groups))] != before
    if world.rank:
        engine.core.step = lambda: 1 / 0  # the other rank is then within its step
    with pytest.raises(EngineFailed):
        list(engine.generate(groups, SAMPLING, seed=3))


if __name__ == "__main__":
    environment.prepare(2)
    main(Path(sys.argv[1]))
