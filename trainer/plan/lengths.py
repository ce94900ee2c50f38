"""Lengths of the user's own data, in tokens, from a sample of its rows."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from operator import add
from pathlib import Path
from typing import Any

from trainer.base.data_files import expand
from trainer.base.data_tables import open_table
from trainer.base.errors import UserError, first_line
from trainer.base.json_tables import Row
from trainer.base.model_files import tokenizer_advice
from trainer.base.model_folder import KEY

SAMPLE = 2000
"""Rows that are measured."""
CHARACTERS_PER_TOKEN = 4.0
"""Rule of thumb for English where no tokenizer is at hand."""


@dataclass(frozen=True, kw_only=True)
class DataLengths:
    """Lengths of prompts and responses in the data, in tokens."""

    rows: int | None
    """Rows of all files; None when not counted."""
    measured: int
    """Rows that were measured."""
    mean_prompt: float
    mean_response: float | None
    """None when the rows hold no response."""
    longest: int
    """Most tokens of prompt and response together."""
    exact: bool
    """Whether the model's own tokenizer counted; else estimated from characters."""


def measure(
    files: str | list[str], prompt_key: str, response_key: str, tokenizer: Path | None
) -> DataLengths:
    """Lengths of the first ``SAMPLE`` rows.

    Raises UserError for a missing file or field; its message lists the fields that there are.
    """
    paths = expand(files, "data.train_files")
    count = _counter(tokenizer)
    prompts: list[int] = []
    responses: list[int] = []
    for path, row in islice(_rows(paths), SAMPLE):
        if prompt_key not in row:
            raise UserError(
                f"data.prompt_key={prompt_key}: {path} has no such field; it has "
                f"{', '.join(map(str, row))}. "
                "Set data.prompt_key"
            )
        prompt, response = _prompt_and_response(row, prompt_key, response_key)
        prompts.append(count(prompt))
        if response is not None:
            responses.append(count(response))
    if not prompts:
        raise UserError(f"data.train_files: no rows in {', '.join(map(str, paths))}")
    complete = len(responses) == len(prompts)
    if not complete:
        responses = [0] * len(prompts)
    return DataLengths(
        rows=sum(_row_count(path) for path in paths),
        measured=len(prompts),
        mean_prompt=sum(prompts) / len(prompts),
        mean_response=sum(responses) / len(responses) if complete else None,
        longest=max(map(add, prompts, responses)),
        exact=tokenizer is not None,
    )


def _rows(paths: list[Path]) -> Iterator[tuple[Path, Row]]:
    for path in paths:
        if path.suffix == ".parquet":
            # Row by row a Parquet file would be unpacked whole. pyarrow may lack on a login node.
            from trainer.base.arrow_tables import first_rows

            yield from ((path, row) for row in first_rows(path))
        else:
            table = open_table(path)
            yield from ((path, table.read(i)) for i in range(len(table)))


def _row_count(path: Path) -> int:
    if path.suffix == ".parquet":
        from trainer.base.arrow_tables import row_count

        return row_count(path)
    return len(open_table(path))


def _prompt_and_response(row: Row, prompt_key: str, response_key: str) -> tuple[str, str | None]:
    """The texts of a row. A conversation that ends with the assistant, without a response field, is
    divided at the assistant's first turn, as the trainer does.
    """
    prompt = row[prompt_key]
    if row.get(response_key) is not None:
        return _text(prompt), _text(row[response_key])
    if isinstance(prompt, list):
        roles = [message.get("role") for message in prompt if isinstance(message, dict)]
        if len(roles) == len(prompt) and roles[-1:] == ["assistant"]:
            first = roles.index("assistant")
            return _text(prompt[:first]), _text(prompt[first:])
    return _text(prompt), None


def _text(value: Any) -> str:
    """The text of a field: itself, or the contents of chat messages, which may be in parts."""
    if isinstance(value, list):
        return "\n".join(_text_of(item) for item in value)
    return str(value)


def _text_of(message: Any) -> str:
    content = message.get("content") if isinstance(message, dict) else message
    if isinstance(content, list):
        texts = [part.get("text") if isinstance(part, dict) else part for part in content]
        return "".join(str(text or "") for text in texts)
    return str(content or "")


def _counter(tokenizer: Path | None) -> Callable[[str], int]:
    """A function that counts the tokens of a text. Raises UserError for a damaged tokenizer."""
    if tokenizer is None:
        return lambda text: max(1, round(len(text) / CHARACTERS_PER_TOKEN))
    from tokenizers import Tokenizer

    try:
        encode = Tokenizer.from_file(str(tokenizer)).encode
    except Exception as error:  # the file may hold anything, and the library raises just that
        raise UserError(
            f"{KEY}: {tokenizer} is no usable tokenizer ({first_line(error)}): "
            f"{tokenizer_advice(tokenizer.parent)}"
        ) from error
    return lambda text: len(encode(text, add_special_tokens=False).ids)
