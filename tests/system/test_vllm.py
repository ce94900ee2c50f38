"""vLLM itself in this process: its log-probs are the trainer's, its samples those that were asked for."""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.vllm_runs import NEEDS_VLLM, RESPONSE, change, engine_over, ids, prompts, sync, tiny, worst
from trainer.errors import UserError
from trainer.models import LoadedModel
from trainer.rollout import Sampling
from trainer.rollout.agreement import EngineDisagrees, check_agreement
from trainer.rollout.hf import HfEngine

pytestmark = NEEDS_VLLM
DRAWN = Sampling(max_response_length=RESPONSE, temperature=0.7, top_k=50, top_p=0.95)
GREEDY = Sampling(max_response_length=RESPONSE, temperature=0.7, do_sample=False)


@pytest.fixture(scope="module")
def loaded() -> LoadedModel:
    return tiny()


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def engine(loaded: LoadedModel, run_dir: Path) -> Iterator[Any]:
    torch.manual_seed(1)
    random.seed(1)
    states, threads = (torch.get_rng_state(), random.getstate()), torch.get_num_threads()
    engine = engine_over(loaded, run_dir, name="vllm")
    # vLLM leaves nothing behind in the trainer's process.
    assert torch.equal(torch.get_rng_state(), states[0]) and random.getstate() == states[1]
    assert torch.get_num_threads() == threads and "LD_PRELOAD" not in os.environ
    yield engine
    engine.close()
    engine.close()


def test_log_probs_are_the_trainers_before_and_after_an_update(engine: Any, loaded: LoadedModel) -> None:
    for version in (1, 2):
        assert check_agreement(engine, loaded.model, vocabulary=512, dtype=torch.float32, temperature=0.7) < 1e-4
        for sampling, temperature in ((DRAWN, 0.7), (GREEDY, 0.7), (Sampling(max_response_length=RESPONSE), 1.0)):
            finished = list(engine.generate(prompts(), sampling, seed=version))
            assert worst(loaded, prompts(), finished, temperature=temperature) < 1e-4
            assert sorted(ids(finished)) == list(range(5)) and {s.version for f in finished for s in f.samples} == {
                version
            }
        change(loaded)
        if version == 1:
            with pytest.raises(EngineDisagrees, match="differ from the trainer's by up to"):
                check_agreement(engine, loaded.model, vocabulary=512, dtype=torch.float32)
        sync(engine, loaded, version + 1)


def test_greedy_responses_are_the_hf_engines(engine: Any, loaded: LoadedModel) -> None:
    own = HfEngine(loaded.model, eos_ids=engine.eos_ids, max_num_seqs=16)
    ours = ids(list(engine.generate(prompts(), GREEDY, seed=0)))
    assert ours == ids(list(own.generate(prompts(), GREEDY, seed=0)))
    assert {len(s) for samples in ours.values() for s in samples} != {0}


def test_the_seed_names_the_samples_and_a_stop_keeps_what_there_is(engine: Any, loaded: LoadedModel) -> None:
    first = ids(list(engine.generate(prompts(), DRAWN, seed=5)))
    assert first == ids(list(engine.generate(prompts(), DRAWN, seed=5)))
    assert first != ids(list(engine.generate(prompts(), DRAWN, seed=6)))
    assert engine.stats()["tokens"] > 0 and 0 < engine.stats()["busy_rows"] <= 1
    under_way = engine.generate(prompts(), DRAWN, seed=5)
    for _ in range(8):
        under_way._step()
    left = sorted(under_way.stop(), key=lambda f: f.number)
    assert [f.number for f in left] == list(range(5)) and engine.core.open == 0
    aborted = [s for f in left for s in f.samples if s.finish_reason == "aborted"]
    assert aborted and any(len(s.response_ids) == 8 for s in aborted)
    begun = [dataclasses.replace(g, begun=f.samples) for g, f in zip(prompts(), left, strict=True)]
    whole = list(engine.generate(begun, DRAWN, seed=5))
    assert worst(loaded, prompts(), whole, temperature=0.7) < 1e-4
    for f in whole:
        for sample, before in zip(f.samples, left[f.number].samples, strict=True):
            assert sample.response_ids[: len(before.response_ids)].tolist() == before.response_ids.tolist()
            assert sample.finish_reason == "stop" or len(sample.response_ids) == RESPONSE


def test_what_can_not_be(engine: Any, loaded: LoadedModel, run_dir: Path) -> None:
    with pytest.raises(UserError, match="are more than the 72"):
        engine.generate([dataclasses.replace(prompts()[0], prompt_ids=[5] * 60)], DRAWN, seed=0)
    with pytest.raises(UserError, match=r"= 9048 tokens, and .* knows 8192 positions"):
        engine_over(loaded, run_dir / "other", name="vllm", response_length=9000, max_num_batched_tokens=9100)

    class NewModelForCausalLM(torch.nn.Module):
        config = loaded.model.config

    with pytest.raises(UserError, match=r"vLLM has no NewModelForCausalLM.*=hf"):
        engine_over(dataclasses.replace(loaded, model=_like(NewModelForCausalLM(), loaded)), run_dir / "x", name="vllm")
    log = run_dir / "vllm" / "rank_0" / "engine.log"
    assert log.stat().st_size and log.stat().st_mode & 0o077 == 0 and log.parent.stat().st_mode & 0o077 == 0


def test_logits_that_are_not_finite(engine: Any, loaded: LoadedModel) -> None:
    kept = [p.detach().clone() for p in loaded.model.parameters()]
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(float("nan"))
    sync(engine, loaded, 8)
    with pytest.raises(FloatingPointError):
        list(engine.generate(prompts(), DRAWN, seed=0))
    with torch.no_grad():
        for parameter, value in zip(loaded.model.parameters(), kept, strict=True):
            parameter.copy_(value)
    sync(engine, loaded, 9)
    assert worst(loaded, prompts(), list(engine.generate(prompts(), DRAWN, seed=0)), temperature=0.7) < 1e-4


def _like(module: torch.nn.Module, loaded: LoadedModel) -> torch.nn.Module:
    module.weight = torch.nn.Parameter(torch.zeros(1, dtype=next(loaded.model.parameters()).dtype))
    return module
