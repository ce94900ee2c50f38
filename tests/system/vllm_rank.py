"""Ranks with vLLM in their processes, alone and together: ``python -m tests.system.vllm_rank
FOLDER``.
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

from tests.system.vllm_runs import RESPONSE, change, engine_over, ids, prompts, sync, tiny, worst
from trainer.base import environment
from trainer.base.environment import rank_from_environment
from trainer.models import LoadedModel
from trainer.ranks.world import World, join, leave
from trainer.rollout import EngineFailed, Sampling
from trainer.rollout.agreement import check_agreement

SAMPLING = Sampling(max_response_length=RESPONSE, temperature=0.7)


def main(folder: Path) -> None:
    info = rank_from_environment()
    world = join(info, device="cpu", run_dir=folder, meet_s=500.0, timeout_s=500.0)
    loaded, found = tiny(), {}
    for size in (1, 2):
        engine = engine_over(
            loaded, folder, world=world, name="vllm", tensor_model_parallel_size=size
        )
        check_agreement(engine, loaded.model, vocabulary=512, dtype=torch.float32)
        mine = prompts()[world.rank :: world.size]  # not equally many
        drawn = ids(list(engine.generate(mine, SAMPLING, seed=3)))
        found[size] = [drawn[k] for k in sorted(drawn)]
        if size > 1:
            ask_unequally(engine, loaded, world, found[size])
        engine.close()
        gc.collect()
        world.barrier()  # the trainer's groups are as they were
        assert dist.is_initialized()
    (folder / f"rank_{world.rank}.json").write_text(json.dumps(found))
    leave()


def ask_unequally(engine: Any, loaded: LoadedModel, world: World, before: list[Any]) -> None:
    """What ranks that share an engine may do differently, after each of which they meet again."""
    mine = prompts()[world.rank :: world.size]
    assert list(engine.generate(mine if world.rank else [], SAMPLING, seed=3)) == [] or world.rank
    world.barrier()
    under_way = engine.generate(mine, SAMPLING, seed=3)
    if world.rank:
        assert list(ids(list(under_way)).values()) and ids(
            list(engine.generate(mine, SAMPLING, seed=3))
        )
    else:
        first = next(iter(under_way))
        left = under_way.stop()
        assert sorted(f.number for f in [first, *left]) == list(range(len(mine)))
        list(engine.generate([], SAMPLING, seed=3))
    assert engine.core.open == 0
    change(loaded)
    sync(engine, loaded, 2)
    again = list(engine.generate(mine, SAMPLING, seed=3))
    assert worst(loaded, mine, again, temperature=0.7) < 1e-4
    assert [ids(again)[k] for k in range(len(mine))] != before
    if world.rank:
        engine.core.step = lambda: 1 / 0  # the other one is in the middle of its step by then
    with pytest.raises(EngineFailed):
        list(engine.generate(mine, SAMPLING, seed=3))


if __name__ == "__main__":
    environment.prepare(2)
    main(Path(sys.argv[1]))
