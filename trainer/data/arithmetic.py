"""The built-in task: sums to train on without a file."""

from __future__ import annotations

import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import xxhash

from trainer.data.dataset import Fingerprint
from trainer.data.encode import Encoder
from trainer.data.example import Example
from trainer.data.fields import DataRow

NAME = "arithmetic"
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
}
_VAL_SHARE = 8
"""One of so many questions belongs to validation."""


@dataclass(frozen=True, kw_only=True)
class ArithmeticSettings:
    """Range and number of the sums."""

    low: int = 0
    """Least operand."""
    high: int = 19
    """Greatest operand."""
    operations: tuple[Literal["+", "-", "*"], ...] = ("+",)
    train_size: int = 10_000
    """Training samples (the same question may come twice)."""
    val_size: int = 256
    """Validation samples."""


class Problem(NamedTuple):
    """A sum to work out."""

    question: str
    worked_answer: str
    """The answer as a response to learn (SFT)."""
    result: str


def problem(
    settings: ArithmeticSettings, split: Literal["train", "val"], seed: int, index: int
) -> Problem:
    """The problem of sample ``index``. Pure.

    A hash of the question decides whether it belongs to validation, so that no question is in both
    splits, whatever the seeds.
    """
    for draw in range(10_000):
        rng = random.Random(f"{seed}/{split}/{index}/{draw}")
        a = rng.randint(settings.low, settings.high)
        b = rng.randint(settings.low, settings.high)
        op = rng.choice(settings.operations)
        if _is_val(f"{a} {op} {b}") == (split == "val"):
            result = OPERATIONS[op](a, b)
            return Problem(f"What is {a} {op} {b}?", f"#### {result}", str(result))
    raise ValueError(
        f"too few questions between {settings.low} and {settings.high} for a {split} set of their "
        "own"
    )


def _is_val(question: str) -> bool:
    return bool(xxhash.xxh64_intdigest(question.encode()) % _VAL_SHARE == 0)


class ArithmeticDataset:
    """The data of ``data.task=arithmetic``; ``with_response`` adds the worked answer (SFT)."""

    def __init__(
        self,
        encoder: Encoder,
        *,
        split: Literal["train", "val"],
        seed: int = 0,
        with_response: bool = False,
        limit: int | None = None,
        settings: ArithmeticSettings | None = None,
    ) -> None:
        self._encoder = encoder
        self._split = split
        self._with_response = with_response
        self._settings = settings or ArithmeticSettings()
        size = self._settings.train_size if split == "train" else self._settings.val_size
        self._size = size if limit is None else min(limit, size)
        # Runs with different seeds are compared on one validation set.
        self._seed = seed if split == "train" else 0
        recipe = repr((self._settings, split, self._seed, self._size, with_response))
        self.fingerprint = Fingerprint(
            name=f"builtin:{NAME} {split} (seed {self._seed}, {self._size} samples)",
            digest=xxhash.xxh3_128_hexdigest(recipe.encode()),
        )

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> Example:
        if not 0 <= index < self._size:
            raise IndexError(index)
        made = problem(self._settings, self._split, self._seed, index)
        sample = DataRow(
            prompt=made.question,
            response=made.worked_answer if self._with_response else None,
            ground_truth=made.result,
            data_source=NAME,
            extra_info={},
        )
        return self._encoder.encode(sample, index=index, file=f"builtin:{NAME}", row=index)
