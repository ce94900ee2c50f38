from __future__ import annotations

import pytest

from tests.data.toy import encoder
from trainer.data import ArithmeticDataset, ArithmeticSettings
from trainer.data.arithmetic import problem
from trainer.rewards import maths


def questions(ds: ArithmeticDataset) -> list[str]:
    return ["".join(map(chr, ds[i].prompt_ids)) for i in range(len(ds))]


def test_training_and_validation_never_share_a_question() -> None:
    train = ArithmeticDataset(encoder(), split="train", seed=1, limit=3000)
    val = ArithmeticDataset(encoder(), split="val", seed=1)
    assert len(val) == ArithmeticSettings().val_size
    assert not set(questions(train)) & set(questions(val))
    assert len(set(questions(train))) > 300


def test_samples_follow_from_seed_and_index_and_validation_from_neither() -> None:
    a, b = (ArithmeticDataset(encoder(), split="train", seed=s, limit=50) for s in (1, 2))
    assert questions(a) == questions(ArithmeticDataset(encoder(), split="train", seed=1, limit=50))
    assert questions(a) != questions(b)
    assert a.fingerprint != b.fingerprint
    vals = [ArithmeticDataset(encoder(), split="val", seed=s, limit=50) for s in (1, 2)]
    assert questions(vals[0]) == questions(vals[1])
    assert problem(ArithmeticSettings(), "train", 1, 0) == PINNED


PINNED = ("What is 6 + 16?", "#### 22", "22")


def test_the_worked_answer_earns_the_reward() -> None:
    settings = ArithmeticSettings(low=0, high=30, operations=("+", "-", "*"))
    for i in range(60):
        question, answer, result = problem(settings, "train", 0, i)
        assert maths("arithmetic", answer, result) == 1.0
        assert maths("arithmetic", answer + "1", result) == 0.0
        assert question.startswith("What is ")


def test_responses_are_there_for_sft_only() -> None:
    sft = ArithmeticDataset(encoder(), split="train", with_response=True, limit=1)[0]
    assert "".join(map(chr, sft.response_ids or [])).endswith(f"#### {sft.ground_truth}\0")
    assert ArithmeticDataset(encoder(), split="train", limit=1)[0].response_ids is None


def test_operands_that_leave_no_question_for_a_split_are_refused() -> None:
    with pytest.raises(ValueError, match="too few questions"):
        [problem(ArithmeticSettings(low=1, high=1), s, 0, 0) for s in ("train", "val")]  # type: ignore[arg-type]
    with pytest.raises(IndexError):
        ArithmeticDataset(encoder(), split="val", limit=3)[3]
