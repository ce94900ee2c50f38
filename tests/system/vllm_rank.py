"""One of several ranks, each with vLLM in its own process: ``python -m tests.system.vllm_rank FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch

from tests.system.vllm_runs import RESPONSE, engine_over, ids, prompts, tiny
from trainer import environment
from trainer.environment import rank_from_environment
from trainer.parallel.world import join, leave
from trainer.rollout import Sampling
from trainer.rollout.agreement import check_agreement


def main(folder: Path) -> None:
    info = rank_from_environment()
    world = join(info, device="cpu", run_dir=folder, meet_s=120.0, timeout_s=240.0)
    loaded = tiny()
    engine = engine_over(loaded, folder, world=world, name="vllm")
    check_agreement(engine, loaded.model, vocabulary=512, dtype=torch.float32)
    mine = prompts()[world.rank :: world.size]  # not equally many
    found = ids(list(engine.generate(mine, Sampling(max_response_length=RESPONSE, temperature=0.7), seed=3)))
    engine.close()
    world.barrier()  # the trainer's groups are as they were
    (folder / f"rank_{world.rank}.json").write_text(json.dumps([found[k] for k in sorted(found)]))
    leave()


if __name__ == "__main__":
    environment.prepare(2)
    main(Path(sys.argv[1]))
