"""vLLM itself in a server: the same samples as ever, also of one that is killed in the middle."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import torch

from tests.system.vllm_runs import (
    NEEDS_VLLM,
    RESPONSE,
    change,
    engine_over,
    ids,
    prompts,
    sync,
    tiny,
    worst,
)
from trainer.rollout import Sampling
from trainer.rollout.agreement import check_agreement
from trainer.rollout.hf import HfEngine

pytestmark = NEEDS_VLLM
DRAWN = Sampling(max_response_length=RESPONSE, temperature=0.7, top_k=50)
GREEDY = Sampling(max_response_length=RESPONSE, temperature=0)


def test_a_server_draws_what_the_trainer_means_and_survives_a_kill(tmp_path: Path) -> None:
    loaded = tiny()
    # Room for 4 of the 16 that it may draw at once: it begins more, and takes some back when they
    # grow.
    engine = engine_over(loaded, tmp_path, name="vllm_server", blocks=13)
    try:
        change(loaded)
        sync(engine, loaded, 2)
        assert check_agreement(engine, loaded.model, vocabulary=512, dtype=torch.float32) < 1e-4
        own = HfEngine(loaded.model, eos_ids=engine.eos_ids, max_num_seqs=16)
        greedy = ids(list(engine.generate(prompts(), GREEDY, seed=0)))
        assert greedy == ids(list(own.generate(prompts(), GREEDY, seed=0)))
        whole = list(engine.generate(prompts(), DRAWN, seed=1))
        assert ids(whole) == ids(list(own.generate(prompts(), DRAWN, seed=1)))
        assert worst(loaded, prompts(), whole, temperature=0.7) < 1e-4
        for version in range(3, 9):  # one that was quicker than its end is ended once more
            under_way = engine.generate(prompts(), DRAWN, seed=1)
            (pid,) = engine.fleet.pids
            os.kill(pid, signal.SIGKILL)
            again = list(under_way)
            assert ids(again) == ids(whole)
            if engine.stats()["restarts"]:
                break
            sync(engine, loaded, version)
        assert engine.stats()["restarts"] == 1
        assert worst(loaded, prompts(), again, temperature=0.7) < 1e-4
        left = engine.generate(prompts(), DRAWN, seed=1).stop()
        assert sorted(f.number for f in left) == list(range(5))
    finally:
        engine.close()
    assert engine.fleet.pids == []
