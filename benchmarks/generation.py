"""What the generation benchmarks share: prompts, models, ways to generate, and turns of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch
import yaml
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from benchmarks.harness import SHARED
from trainer.config.schema.data import Data
from trainer.data import make_dataset
from trainer.models import LoadedModel, load_model
from trainer.rollout import Group, RolloutEngine, Sampling, eos_ids
from trainer.rollout.hf import HfEngine

ROOT = Path(__file__).resolve().parents[1]
Generate = Callable[[int, int], list[int]]
"""(seed, most tokens of a response) -> tokens of each response, its end token included."""


TINY, SMOLLM2 = "builtin:tiny", "builtin:smollm2"
WARM = 4
"""Tokens of the responses that warm a way up."""


@dataclass(frozen=True)
class Case:
    """``prompts`` questions, ``n`` responses of at most ``limit`` tokens to each, ``rounds``
    times.
    """

    model: str
    prompts: int
    n: int
    limit: int
    rounds: int


def cases(quick: bool, model: str | None) -> list[Case]:
    """The cases of the table, or of ``--quick``; only those of ``model`` unless it is None."""
    everything = (
        [Case(TINY, 4, 8, 48, 2)]
        if quick
        else [Case(TINY, 16, 8, 256, 2), Case(SMOLLM2, 4, 8, 32, 2)]
    )
    return [c for c in everything if model in (None, c.model)]


def read_prompts(loaded: LoadedModel, count: int) -> list[list[int]]:
    """Token ids of the first GSM8K training questions under ``data=gsm8k``.

    Sums of the built-in arithmetic task where the file is missing.
    """
    defaults = yaml.safe_load((ROOT / "conf/config.yaml").read_text())["data"]
    settings = yaml.safe_load((ROOT / "conf/data/gsm8k.yaml").read_text())["data"]
    file = SHARED / "data/gsm8k/train.jsonl"
    settings |= {"train_files": [str(file)]} if file.exists() else {"task": "arithmetic"}
    settings |= {
        "seed": 0,
        "num_workers": 0,
        "filter_overlong_prompts": False,
        "train_max_samples": count,
    }
    settings |= {"max_prompt_length": 2048, "max_response_length": 1}
    whole = {**defaults, **settings}
    data = Data(**{key: whole[key] for key in Data.model_fields if key in whole})
    dataset = make_dataset(
        data, loaded.tokenizer, split="train", mode="rl", vocabulary=loaded.shape.vocab
    )
    assert dataset is not None
    return [list(dataset[i].prompt_ids) for i in range(count)]


def through_engine(engine: RolloutEngine, case: Case, prompts: Sequence[Sequence[int]]) -> Generate:
    """Generation by one of our engines, which is started."""
    groups = [
        Group(prompt_ids=p, sample_ids=range(i * case.n, (i + 1) * case.n), step=0)
        for i, p in enumerate(prompts)
    ]

    def generate(seed: int, limit: int) -> list[int]:
        sampling = Sampling(max_response_length=limit)
        return [
            len(s.response_ids)
            for f in engine.generate(groups, sampling, seed=seed)
            for s in f.samples
        ]

    return generate


def hf(loaded: LoadedModel, max_num_seqs: int = 256) -> HfEngine:
    """The ``hf`` engine as the trainer makes it."""
    return HfEngine(
        loaded.model, eos_ids=eos_ids(loaded.model, loaded.tokenizer), max_num_seqs=max_num_seqs
    )


def plain(loaded: LoadedModel, case: Case, prompts: Sequence[Sequence[int]]) -> Generate:
    """transformers' generate as TRL calls it: each prompt n times, pads on the left, one batch
    until all have ended.
    """
    logging.disable_progress_bar()
    model: Any = AutoModelForCausalLM.from_pretrained(
        loaded.source,
        dtype=torch.float32,
        attn_implementation="sdpa",
        trust_remote_code=False,
    )
    ends = eos_ids(loaded.model, loaded.tokenizer)
    pad = int(loaded.tokenizer.pad_token_id)
    width = max(map(len, prompts))
    rows = [[pad] * (width - len(p)) + list(p) for p in prompts for _ in range(case.n)]
    masks = [[0] * (width - len(p)) + [1] * len(p) for p in prompts for _ in range(case.n)]
    ids, mask = torch.tensor(rows), torch.tensor(masks)
    end = torch.tensor(ends)

    def generate(seed: int, limit: int) -> list[int]:
        torch.manual_seed(seed)
        with torch.no_grad():
            out: Tensor = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=limit,
                eos_token_id=ends,
                pad_token_id=pad,
            )[:, width:]
        stops = torch.isin(out, end)
        first = torch.where(stops.any(dim=1), stops.int().argmax(dim=1) + 1, out.shape[1])
        return [int(n) for n in first]

    return generate


def load(name: str) -> LoadedModel:
    """A built-in model in float32 on the CPU, not training."""
    loaded = load_model(name, dtype=torch.float32, device="cpu")
    loaded.model.eval()
    return loaded


def take_turns(ways: dict[str, Generate], case: Case) -> dict[str, list[tuple[float, list[int]]]]:
    """Seconds and response lengths of each way, by round.

    Every other round is in the opposite order.
    """
    for generate in ways.values():
        generate(0, WARM)
    measured: dict[str, list[tuple[float, list[int]]]] = {name: [] for name in ways}
    for number in range(1, case.rounds + 1):
        for name in list(ways) if number % 2 else reversed(ways):
            began = perf_counter()
            lengths = ways[name](number, case.limit)
            measured[name].append((perf_counter() - began, lengths))
    return measured


def tokens_per_second(measured: dict[str, list[tuple[float, list[int]]]]) -> dict[str, float]:
    """Tokens per second of each way: the median of its rounds."""
    return {name: median(sum(n) / s for s, n in rounds) for name, rounds in measured.items()}
