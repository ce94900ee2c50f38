"""vLLM in this process has the log-probs of the trainer and generates the samples of the hf engine,
up to near-ties of tokens.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

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
from trainer.base.errors import UserError
from trainer.models import LoadedModel
from trainer.models.lora import Lora, adapters_off, add_adapters
from trainer.ranks.rendezvous import free_port, port_for
from trainer.rollout import NotFiniteError, Sampling
from trainer.rollout.hf import HfEngine
from trainer.rollout.log_prob_check import LogProbMismatch, check_log_probs

pytestmark = NEEDS_VLLM
ROOT = Path(__file__).parents[2]
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
    # The planner imports numba before vLLM, which once crashed vLLM.
    importlib.import_module("numba")
    torch.manual_seed(1)
    random.seed(1)
    torch_state = torch.get_rng_state()
    python_state = random.getstate()
    threads = torch.get_num_threads()
    engine = engine_over(loaded, run_dir, name="vllm")
    # vLLM leaves nothing behind in the trainer's process.
    assert torch.equal(torch.get_rng_state(), torch_state) and random.getstate() == python_state
    assert torch.get_num_threads() == threads and "LD_PRELOAD" not in os.environ
    yield engine
    engine.close()
    engine.close()


def test_log_probs_equal_the_trainers_before_and_after_an_update(
    engine: Any, loaded: LoadedModel
) -> None:
    for version in (1, 2):
        difference = check_log_probs(
            engine, loaded.model, vocabulary=512, dtype=torch.float32, temperature=0.7
        )
        assert difference < 1e-4
        for sampling, temperature in (
            (DRAWN, 0.7),
            (GREEDY, 0.7),
            (Sampling(max_response_length=RESPONSE), 1.0),
        ):
            finished = list(engine.generate(prompts(), sampling, seed=version))
            assert largest_difference(loaded, prompts(), finished, temperature=temperature) < 1e-4
            assert sorted(ids(finished)) == list(range(5))
            assert {s.version for f in finished for s in f.samples} == {version}
        perturb(loaded)
        if version == 1:
            with pytest.raises(LogProbMismatch, match="differ from the trainer's by up to"):
                check_log_probs(engine, loaded.model, vocabulary=512, dtype=torch.float32)
        sync(engine, loaded, version + 1)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(max_response_length=RESPONSE)])
def test_responses_equal_those_of_the_hf_engine(
    engine: Any, loaded: LoadedModel, sampling: Sampling
) -> None:
    hf = HfEngine(loaded.model, eos_ids=engine.eos_ids, max_num_seqs=16)
    drawn = list(engine.generate(prompts(), sampling, seed=4))
    from_hf = list(hf.generate(prompts(), sampling, seed=4))
    assert_same_draws(loaded, prompts(), ids(drawn), ids(from_hf), sampling, seed=4)
    if not sampling.greedy:
        with_another_seed = list(engine.generate(prompts(), sampling, seed=5))
        with pytest.raises(AssertionError):
            assert_same_draws(
                loaded, prompts(), ids(drawn), ids(with_another_seed), sampling, seed=4
            )
    assert engine.stats()["tokens"] > 0 and 0 < engine.stats()["busy_rows"] <= 1


def test_a_stopped_generation_continues_to_the_same_responses(
    engine: Any, loaded: LoadedModel
) -> None:
    whole = list(engine.generate(prompts(), DRAWN, seed=5))
    under_way = engine.generate(prompts(), DRAWN, seed=5)
    for _ in range(8):
        under_way._step()
    left = sorted(under_way.stop(), key=lambda f: f.number)
    assert [f.number for f in left] == list(range(5)) and engine.core.num_unfinished == 0
    aborted = [s for f in left for s in f.samples if s.finish_reason == "aborted"]
    assert aborted and any(5 <= len(s.response_ids) <= 8 for s in aborted)
    partial = [
        dataclasses.replace(g, partial_samples=f.samples)
        for g, f in zip(prompts(), left, strict=True)
    ]
    rest = list(engine.generate(partial, DRAWN, seed=5))
    assert_same_draws(loaded, prompts(), ids(rest), ids(whole), DRAWN, seed=5)
    assert largest_difference(loaded, prompts(), rest, temperature=0.7) < 1e-4


def test_a_stop_aborts_the_requests_and_they_are_drawn_again_as_they_were(
    engine: Any, loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = list(engine.generate(prompts(), DRAWN, seed=6))
    assert_stops(engine, prompts(), DRAWN, seed=6, monkeypatch=monkeypatch)
    assert engine.core.num_unfinished == 0
    again = list(engine.generate(prompts(), DRAWN, seed=6))
    assert_same_draws(loaded, prompts(), ids(again), ids(whole), DRAWN, seed=6)


def test_prompts_and_models_that_do_not_fit_vllm_are_refused(
    engine: Any, loaded: LoadedModel, run_dir: Path
) -> None:
    with pytest.raises(UserError, match="exceed the 72 tokens of the engine"):
        engine.generate([dataclasses.replace(prompts()[0], prompt_ids=[5] * 60)], DRAWN, seed=0)
    with pytest.raises(
        UserError, match=r"of 9000 exceed the 8192 tokens of .*max_position_embeddings"
    ):
        engine_over(
            loaded,
            run_dir / "other",
            name="vllm",
            response_length=9000,
            max_num_batched_tokens=9100,
        )

    class NewModelForCausalLM(torch.nn.Module):
        config = loaded.model.config

    with pytest.raises(UserError, match=r"vLLM has no NewModelForCausalLM.*=hf"):
        engine_over(
            dataclasses.replace(loaded, model=_with_a_weight(NewModelForCausalLM(), loaded)),
            run_dir / "x",
            name="vllm",
        )
    unknown_rope = tiny()
    unknown_rope.model.config.rope_parameters = {"rope_type": "none such"}
    with pytest.raises(UserError, match="vLLM refuses this model or these settings"):
        engine_over(unknown_rope, run_dir / "unknown_rope", name="vllm")
    log = run_dir / "vllm" / "rank_0" / "engine.log"
    assert log.stat().st_size
    assert log.stat().st_mode & 0o077 == 0 and log.parent.stat().st_mode & 0o077 == 0


def test_adapters_are_merged_into_the_synced_weights(engine: Any) -> None:
    adapted = tiny()
    add_adapters(adapted.model, Lora(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
    sync(engine, adapted, 9)
    finished = list(engine.generate(prompts(), DRAWN, seed=5))
    assert largest_difference(adapted, prompts(), finished, temperature=0.7) < 1e-4
    with adapters_off(adapted.model):
        assert largest_difference(adapted, prompts(), finished, temperature=0.7) > 1e-2


def test_two_ranks_generate_the_responses_of_one(engine: Any, tmp_path: Path) -> None:
    port = free_port(port_for(str(tmp_path)))
    ranks = [_start_rank(number, port, tmp_path) for number in range(2)]
    try:
        codes = [rank.wait(timeout=900) for rank in ranks]
    finally:
        for running in [rank for rank in ranks if rank.poll() is None]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(running.pid, signal.SIGKILL)
    assert codes == [0, 0], "".join(
        (tmp_path / f"rank_{r}.log").read_text()[-3000:] for r in range(2)
    )
    per_rank = [json.loads((tmp_path / f"rank_{r}.json").read_text()) for r in range(2)]
    sync(engine, tiny(), 10)
    sampling = Sampling(max_response_length=RESPONSE, temperature=0.7)
    expected = list(engine.generate(prompts(), sampling, seed=3))
    for size in "12":  # ranks with an engine each, and ranks that share one
        responses = {
            2 * index + rank: samples
            for rank, by_size in enumerate(per_rank)
            for index, samples in enumerate(by_size[size])
        }
        assert_same_draws(tiny(), prompts(), responses, ids(expected), sampling, seed=3)


def test_logits_that_are_not_finite_are_an_error(engine: Any, loaded: LoadedModel) -> None:
    """Runs last: the key-value cache is not finite afterwards either."""
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(float("nan"))
    sync(engine, loaded, 11)
    with pytest.raises(NotFiniteError):
        list(engine.generate(prompts(), DRAWN, seed=0))
    assert engine.core.num_unfinished == 0


def _start_rank(number: int, port: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start one of two ranks of ``tests.system.vllm_rank``; its log goes to ``folder``."""
    env = dict(
        os.environ,
        RANK=str(number),
        WORLD_SIZE="2",
        LOCAL_RANK=str(number),
        MASTER_PORT=str(port),
    )
    with (folder / f"rank_{number}.log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "tests.system.vllm_rank", str(folder)],
            env=env,
            cwd=ROOT,
            stdout=log,
            stderr=subprocess.STDOUT,
            process_group=0,
        )


def _with_a_weight(module: torch.nn.Module, loaded: LoadedModel) -> torch.nn.Module:
    module.weight = torch.nn.Parameter(torch.zeros(1, dtype=next(loaded.model.parameters()).dtype))
    return module
