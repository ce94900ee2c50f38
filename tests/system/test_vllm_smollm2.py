"""SmolLM2 through vLLM in float32: its greedy samples equal the hf engine's, its log-probs the
trainer's.
"""

from __future__ import annotations

from pathlib import Path

import torch

from tests.system.vllm_runs import (
    NEEDS_VLLM,
    assert_same_draws,
    engine_over,
    ids,
    largest_difference,
    sync,
)
from trainer.models import LoadedModel, load_model
from trainer.rollout import Group, Sampling
from trainer.rollout.hf import HfEngine
from trainer.rollout.log_prob_check import check_log_probs

pytestmark = NEEDS_VLLM
QUESTIONS = (
    "Natalia sold clips to 48 of her friends, and then half as many again. How many did she sell "
    "altogether?",
    "What is 17 times 3?",
    "A robe takes 2 bolts of blue fiber and half that much white fiber. How many bolts in total "
    "does it take?",
)
LENGTH = 16


def question_group(loaded: LoadedModel, number: int) -> Group:
    """Two samples of question ``number``."""
    prompt = loaded.tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTIONS[number]}],
        add_generation_prompt=True,
        return_dict=True,
    )
    sample_ids = range(2 * number, 2 * number + 2)
    return Group(prompt_ids=prompt["input_ids"], sample_ids=sample_ids, step=0)


def test_smollm2_generates_as_the_hf_engine(tmp_path: Path) -> None:
    loaded = load_model("builtin:smollm2", dtype=torch.float32, device="cpu")
    loaded.model.eval()
    groups = [question_group(loaded, number) for number in range(len(QUESTIONS))]
    hf = HfEngine(loaded.model, eos_ids=[int(loaded.tokenizer.eos_token_id)], max_num_seqs=8)
    engine = engine_over(
        loaded,
        tmp_path,
        name="vllm_server",
        prompt_length=96,
        response_length=LENGTH,
        max_num_seqs=8,
    )
    try:
        drawn = Sampling(max_response_length=LENGTH, temperature=0.8, top_p=0.95)
        for version in (2, 3):
            with torch.no_grad():  # far more than an optimizer step
                for number, parameter in enumerate(loaded.model.parameters()):
                    noise = torch.randn(
                        parameter.shape, generator=torch.Generator().manual_seed(number)
                    )
                    parameter.add_(noise, alpha=0.02 * float(parameter.std()))
            sync(engine, loaded, version)
            difference = check_log_probs(
                engine, loaded.model, vocabulary=loaded.shape.vocab, dtype=torch.float32
            )
            assert difference < 1e-4
            finished = list(engine.generate(groups, drawn, seed=version))
            assert largest_difference(loaded, groups, finished, temperature=0.8) < 1e-4
            assert {s.version for f in finished for s in f.samples} == {version}
        greedy = Sampling(max_response_length=LENGTH, do_sample=False)
        finished = list(engine.generate(groups, greedy, seed=0))
        from_hf = list(hf.generate(groups, greedy, seed=0))
        assert_same_draws(loaded, groups, ids(finished), ids(from_hf), greedy, seed=0)
        assert largest_difference(loaded, groups, finished, temperature=1.0) < 1e-4
    finally:
        engine.close()
