"""One sample, ready to be generated from or learnt from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Tokens of one sample and what the reward needs to judge an answer to it."""

    prompt_ids: list[int]
    """Rendered by the chat template, ends where the answer begins; never empty."""
    response_ids: list[int] | None
    """Answer to learn, with its end token unless it was cut (SFT); None in RL."""
    ground_truth: Any
    """Right answer, or None."""
    data_source: str
    """Name of the data set."""
    index: int
    """Place in the data set (before the shuffle); the same in every run on the same data."""
    file: str
    """Where it was read; ``builtin:arithmetic`` for the built-in task."""
    row: int
    """Row in that file: a line number counted from 1 (JSONL), or a position counted from 0
    (Parquet, Arrow, JSON).
    """
    extra_info: dict[str, Any] = field(default_factory=dict)
    """The row's own ``extra_info``, handed to the reward."""

    @property
    def place(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, row {self.row}"
