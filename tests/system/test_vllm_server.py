"""vLLM in a server generates the samples of the hf engine, near-ties apart, even when it is killed
meanwhile.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import torch

from tests.system.vllm_runs import (
    NEEDS_VLLM,
    RESPONSE,
    assert_same_draws,
    assert_stops,
    engine_over,
    ids,
    largest_difference,
    perturb,
    prompts,
    sync,
    tiny,
)
from trainer.rollout import Sampling
from trainer.rollout.hf import HfEngine
from trainer.rollout.log_prob_check import check_log_probs

pytestmark = NEEDS_VLLM
DRAWN = Sampling(max_response_length=RESPONSE, temperature=0.7, top_k=50)
GREEDY = Sampling(max_response_length=RESPONSE, temperature=0)


def test_a_server_generates_as_the_hf_engine_and_survives_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = tiny()
    # The cache holds 4 of the 16 requests that may run at once: vLLM begins more, and preempts some
    # when they grow.
    engine = engine_over(loaded, tmp_path, name="vllm_server", blocks=13)
    try:
        perturb(loaded)
        sync(engine, loaded, 2)
        assert check_log_probs(engine, loaded.model, vocabulary=512, dtype=torch.float32) < 1e-4
        hf = HfEngine(loaded.model, eos_ids=engine.eos_ids, max_num_seqs=16)
        greedy = list(engine.generate(prompts(), GREEDY, seed=0))
        from_hf = list(hf.generate(prompts(), GREEDY, seed=0))
        assert_same_draws(loaded, prompts(), ids(greedy), ids(from_hf), GREEDY, seed=0)
        whole = list(hf.generate(prompts(), DRAWN, seed=1))
        drawn = list(engine.generate(prompts(), DRAWN, seed=1))
        assert_same_draws(loaded, prompts(), ids(drawn), ids(whole), DRAWN, seed=1)
        assert largest_difference(loaded, prompts(), drawn, temperature=0.7) < 1e-4
        for version in range(3, 9):  # a server that finished before the kill is killed again
            under_way = engine.generate(prompts(), DRAWN, seed=1)
            (pid,) = engine.pool.pids
            os.kill(pid, signal.SIGKILL)
            again = list(under_way)
            assert_same_draws(loaded, prompts(), ids(again), ids(whole), DRAWN, seed=1)
            if engine.stats()["restarts"]:
                break
            sync(engine, loaded, version)
        assert engine.stats()["restarts"] == 1
        assert largest_difference(loaded, prompts(), again, temperature=0.7) < 1e-4
        assert_stops(engine, prompts(), DRAWN, seed=1, monkeypatch=monkeypatch)
        again = list(engine.generate(prompts(), DRAWN, seed=1))
        assert_same_draws(loaded, prompts(), ids(again), ids(whole), DRAWN, seed=1)
        left = engine.generate(prompts(), DRAWN, seed=1).stop()
        assert sorted(f.number for f in left) == list(range(5))
    finally:
        engine.close()
    assert engine.pool.pids == []
