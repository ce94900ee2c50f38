"""From the composed configuration, with the built-in tokenizer and real GSM8K."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from trainer.base.errors import UserError
from trainer.config.schema.data import Data
from trainer.data import make_dataset, make_loader, to_sft_batch
from trainer.models.tiny import make_tokenizer
from trainer.rewards import RewardRequest, Scorer

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return make_tokenizer()


def section(**changes: Any) -> Data:
    defaults = yaml.safe_load((ROOT / "conf/config.yaml").read_text())["data"]
    return Data(**{**defaults, "seed": 1, "num_workers": 0, **changes})


def test_the_built_in_task_makes_batches_for_both_modes(tokenizer: Any) -> None:
    data = section(task="arithmetic", train_batch_size=4)
    sft = make_dataset(data, tokenizer, split="train", mode="sft")
    assert sft is not None
    batch = to_sft_batch(next(iter(make_loader(data, sft, split="train"))))
    assert len(batch) == 4
    ids = batch.columns["input_ids"][: int(batch.lengths[0])]
    assert tokenizer.decode(ids).startswith("<|user|>What is ")
    assert tokenizer.decode(ids[int(batch.rows["prompt_lengths"][0]) :]).endswith("<|end|>")
    val = make_dataset(data, tokenizer, split="val", mode="rl")
    assert val is not None and val[0].response_ids is None
    assert sum(map(len, make_loader(data, val, split="val"))) == len(val)


def test_missing_files_are_named_by_their_key(tokenizer: Any) -> None:
    with pytest.raises(
        UserError, match=r"data.train_files is not set; name a file, or type data.task=arithmetic"
    ):
        make_dataset(section(), tokenizer, split="train", mode="rl")
    assert make_dataset(section(), tokenizer, split="val", mode="rl") is None
    with pytest.raises(UserError, match=r"data.val_files: there is no file"):
        make_dataset(section(val_files="missing.jsonl"), tokenizer, split="val", mode="rl")


def test_gsm8k_loads_and_its_own_answers_earn_the_reward(shared: Path, tokenizer: Any) -> None:
    folder = shared / "data" / "gsm8k"
    data = section(
        train_files=str(folder / "train.jsonl"),
        val_files=str(folder / "test.jsonl"),
        prompt_key="question",
        response_key="answer",
        max_prompt_length=1024,
        max_response_length=1024,
        train_batch_size=64,
    )
    train = make_dataset(data, tokenizer, split="train", mode="sft")
    val = make_dataset(data, tokenizer, split="val", mode="rl")
    assert train is not None and val is not None
    assert (len(train), len(val)) == (7473, 1319)
    examples = next(iter(make_loader(data, train, split="train")))
    batch = to_sft_batch(examples)
    assert batch.num_tokens == sum(len(e.prompt_ids) + len(e.response_ids or []) for e in examples)
    requests = [
        RewardRequest(
            data_source=e.data_source,
            solution_text=tokenizer.decode(e.response_ids, skip_special_tokens=True),
            ground_truth=e.ground_truth,
            index=e.index,
        )
        for e in examples
    ]
    with Scorer() as scorer:
        assert {s.value for s in scorer.score(requests)} == {1.0}
        wrong = [
            RewardRequest(
                data_source="train",
                solution_text=r.solution_text,
                ground_truth=f"{r.ground_truth}1",
            )
            for r in requests
        ]
        assert {s.value for s in scorer.score(wrong)} == {0.0}


def test_every_gsm8k_answer_is_a_plain_number(shared: Path) -> None:
    """So that the reward never needs math-verify for a well-formed answer."""
    import json

    from trainer.data.truth import final_answer
    from trainer.rewards.maths import quick_maths

    for name in ("train", "test"):
        for line in (shared / "data" / "gsm8k" / f"{name}.jsonl").read_text().splitlines():
            answer = json.loads(line)["answer"]
            assert quick_maths(answer, final_answer(answer)) == 1.0, answer
