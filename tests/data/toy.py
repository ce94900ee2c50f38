"""Small stand-ins: a tokenizer of one token per character, and data sets whose samples are their
index.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

from trainer.base.errors import UserError
from trainer.data import Encoder, EncodeSettings, Example, Fingerprint


class CharTokenizer:
    """Token id = code point; 0 ends."""

    eos_token_id = 0
    chat_template: str | None = "toy"

    def __len__(self) -> int:
        return 0x300

    def apply_chat_template(
        self, messages: list[dict[str, Any]], *, chat_template: str | None = None, **_: Any
    ) -> str:
        if chat_template == "{{ broken }}":
            raise ValueError("no such variable")
        return "".join(f"<{m['role']}>{m['content']}" for m in messages) + "<assistant>"

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}


def encoder(**settings: Any) -> Encoder:
    return Encoder(
        CharTokenizer(),
        EncodeSettings(**{"max_prompt_length": 200, "max_response_length": 100, **settings}),
    )


@dataclass
class Toy:
    """Sample i has the prompt [i + 1]. Each other field is the index of a sample that fails in
    that way.
    """

    size: int
    bad: int = -1
    crash: int = -1
    hang: int = -1
    bug: int = -1
    fingerprint: Fingerprint = field(default_factory=lambda: Fingerprint(name="toy", digest="toy"))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Example:
        if index == self.bad:
            raise UserError(f"toy, row {index}: bad")
        if index == self.crash:
            os.kill(os.getpid(), signal.SIGKILL)
        if index == self.hang:
            time.sleep(600)
        if index == self.bug:
            raise ZeroDivisionError("bug")
        return Example(
            prompt_ids=[index + 1],
            response_ids=None,
            ground_truth=None,
            data_source="toy",
            index=index,
            file="toy",
            row=index,
        )
