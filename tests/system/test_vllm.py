"""vLLM itself in this process: its log-probs are the trainer's, its samples those that were asked
for.
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
    change,
    engine_over,
    ids,
    prompts,
    sync,
    tiny,
    worst,
)
from trainer.base.errors import UserError
from trainer.models import LoadedModel
from trainer.models.lora import Lora, adapters_off, add_adapters
from trainer.ranks.rendezvous import free_port, port_for
from trainer.rollout import NotFiniteError, Sampling
from trainer.rollout.agreement import EngineDisagrees, check_agreement
from trainer.rollout.hf import HfEngine

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
    importlib.import_module("numba")  # as the planner does; vLLM's look at all modules fell over it
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


def test_log_probs_are_the_trainers_before_and_after_an_update(
    engine: Any, loaded: LoadedModel
) -> None:
    for version in (1, 2):
        assert (
            check_agreement(
                engine, loaded.model, vocabulary=512, dtype=torch.float32, temperature=0.7
            )
            < 1e-4
        )
        for sampling, temperature in (
            (DRAWN, 0.7),
            (GREEDY, 0.7),
            (Sampling(max_response_length=RESPONSE), 1.0),
        ):
            finished = list(engine.generate(prompts(), sampling, seed=version))
            assert worst(loaded, prompts(), finished, temperature=temperature) < 1e-4
            assert sorted(ids(finished)) == list(range(5)) and {
                s.version for f in finished for s in f.samples
            } == {version}
        change(loaded)
        if version == 1:
            with pytest.raises(EngineDisagrees, match="differ from the trainer's by up to"):
                check_agreement(engine, loaded.model, vocabulary=512, dtype=torch.float32)
        sync(engine, loaded, version + 1)


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN, Sampling(max_response_length=RESPONSE)])
def test_responses_are_the_hf_engines(engine: Any, loaded: LoadedModel, sampling: Sampling) -> None:
    own = HfEngine(loaded.model, eos_ids=engine.eos_ids, max_num_seqs=16)
    ours = ids(list(engine.generate(prompts(), sampling, seed=4)))
    assert ours == ids(list(own.generate(prompts(), sampling, seed=4)))
    assert ours != ids(list(engine.generate(prompts(), sampling, seed=5))) or sampling.greedy
    assert engine.stats()["tokens"] > 0 and 0 < engine.stats()["busy_rows"] <= 1


def test_a_stop_keeps_what_there_is_and_going_on_changes_nothing(
    engine: Any, loaded: LoadedModel
) -> None:
    whole = ids(list(engine.generate(prompts(), DRAWN, seed=5)))
    under_way = engine.generate(prompts(), DRAWN, seed=5)
    for _ in range(8):
        under_way._step()
    left = sorted(under_way.stop(), key=lambda f: f.number)
    assert [f.number for f in left] == list(range(5)) and engine.core.open == 0
    aborted = [s for f in left for s in f.samples if s.finish_reason == "aborted"]
    assert aborted and any(5 <= len(s.response_ids) <= 8 for s in aborted)
    begun = [dataclasses.replace(g, begun=f.samples) for g, f in zip(prompts(), left, strict=True)]
    rest = list(engine.generate(begun, DRAWN, seed=5))
    assert ids(rest) == whole and worst(loaded, prompts(), rest, temperature=0.7) < 1e-4


def test_what_can_not_be(engine: Any, loaded: LoadedModel, run_dir: Path) -> None:
    with pytest.raises(UserError, match="are more than the 72"):
        engine.generate([dataclasses.replace(prompts()[0], prompt_ids=[5] * 60)], DRAWN, seed=0)
    with pytest.raises(UserError, match=r"= 9048 tokens, and .* knows 8192 positions"):
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
            dataclasses.replace(loaded, model=_like(NewModelForCausalLM(), loaded)),
            run_dir / "x",
            name="vllm",
        )
    odd = tiny()
    odd.model.config.rope_parameters = {"rope_type": "none such"}
    with pytest.raises(UserError, match="vLLM refuses this model or these settings"):
        engine_over(odd, run_dir / "odd", name="vllm")
    log = run_dir / "vllm" / "rank_0" / "engine.log"
    assert (
        log.stat().st_size
        and log.stat().st_mode & 0o077 == 0
        and log.parent.stat().st_mode & 0o077 == 0
    )


def test_adapters_arrive_merged(engine: Any) -> None:
    adapted = tiny()
    add_adapters(adapted.model, Lora(rank=4, alpha=8))
    with torch.no_grad():
        for name, parameter in adapted.model.named_parameters():
            if ".lora_B." in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
    sync(engine, adapted, 9)
    finished = list(engine.generate(prompts(), DRAWN, seed=5))
    assert worst(adapted, prompts(), finished, temperature=0.7) < 1e-4
    with adapters_off(adapted.model):
        assert worst(adapted, prompts(), finished, temperature=0.7) > 1e-2


def test_two_ranks_draw_the_samples_of_one(engine: Any, tmp_path: Path) -> None:
    port = free_port(port_for(str(tmp_path)))
    ranks = []
    for number in range(2):
        env = dict(
            os.environ,
            RANK=str(number),
            WORLD_SIZE="2",
            LOCAL_RANK=str(number),
            MASTER_PORT=str(port),
        )
        with (tmp_path / f"rank_{number}.log").open("w") as log:
            ranks.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.system.vllm_rank", str(tmp_path)],
                    env=env,
                    cwd=ROOT,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    process_group=0,
                )
            )
    try:
        codes = [rank.wait(timeout=900) for rank in ranks]
    finally:
        for left in [rank for rank in ranks if rank.poll() is None]:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(left.pid, signal.SIGKILL)
    assert codes == [0, 0], "".join(
        (tmp_path / f"rank_{r}.log").read_text()[-3000:] for r in range(2)
    )
    found = [json.loads((tmp_path / f"rank_{r}.json").read_text()) for r in range(2)]
    sync(engine, tiny(), 10)
    alone = ids(
        list(
            engine.generate(
                prompts(), Sampling(max_response_length=RESPONSE, temperature=0.7), seed=3
            )
        )
    )
    for size in "12":  # an engine for each, and one of two shards
        assert {
            2 * i + r: samples
            for r, mine in enumerate(found)
            for i, samples in enumerate(mine[size])
        } == alone


def test_logits_that_are_not_finite(engine: Any, loaded: LoadedModel) -> None:
    """Last: what the cache holds then is not finite either."""
    with torch.no_grad():
        next(loaded.model.parameters()).fill_(float("nan"))
    sync(engine, loaded, 11)
    with pytest.raises(NotFiniteError):
        list(engine.generate(prompts(), DRAWN, seed=0))
    assert engine.core.open == 0


def _like(module: torch.nn.Module, loaded: LoadedModel) -> torch.nn.Module:
    module.weight = torch.nn.Parameter(torch.zeros(1, dtype=next(loaded.model.parameters()).dtype))
    return module
