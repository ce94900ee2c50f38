"""One sample as tokens, to generate from or to learn from."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """Tokens of one sample and what a reward needs to score an answer to it."""

    prompt_ids: list[int]
    """The prompt in the chat template, up to where the answer begins; never empty."""
    response_ids: list[int] | None
    """The answer to learn (SFT), with its end token unless it was truncated; None in RL. Of several
    turns: all of them, with what others said between.
    """
    ground_truth: Any
    """The right answer, or None."""
    data_source: str
    """Name of the data set."""
    index: int
    """Index in the data set before the shuffle; the same in every run on the same data."""
    file: str
    """The file it comes from; ``builtin:arithmetic`` for the built-in task."""
    row: int
    """Row in that file: a line number counted from 1 (JSONL), or a position counted from 0
    (Parquet, Arrow, JSON).
    """
    extra_info: dict[str, Any] = field(default_factory=dict)
    """The row's ``extra_info``, which reward functions get."""
    response_mask: list[bool] | None = None
    """True for tokens of ``response_ids`` that are the assistant's. None: all are."""
    cut_prompt: bool = False
    """The prompt was cut to ``data.max_prompt_length``."""
    cut_response: bool = False
    """The response was cut to ``data.max_response_length``."""

    @property
    def location(self) -> str:
        """File and row, for messages."""
        return f"{self.file}, row {self.row}"
