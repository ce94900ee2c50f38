"""Lengths of the user's own data, in tokens, from a sample of its rows."""

from __future__ import annotations

import glob
import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError

SAMPLE = 2000
"""Rows that are measured."""
CHARACTERS_PER_TOKEN = 4.0
"""Rule of thumb for English where no tokenizer is at hand."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """Measured lengths."""

    rows: int | None
    """Rows of all files; None when not counted."""
    measured: int
    mean_prompt: float
    mean_response: float | None
    """None when the rows hold no response."""
    longest: int
    exact: bool
    """By the model's own tokenizer; else by characters."""


def measure(
    files: str | list[str], prompt_key: str, response_key: str, tokenizer: Path | None
) -> Lengths:
    """Lengths of the first ``SAMPLE`` rows. Raises UserError for a missing file or field, naming
    what is there.
    """
    paths = _paths(files)
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
        prompts.append(count(_text(row[prompt_key])))
        if response_key in row:
            responses.append(count(_text(row[response_key])))
    if not prompts:
        raise UserError(f"data.train_files: no rows in {', '.join(map(str, paths))}")
    full = len(responses) == len(prompts)
    return Lengths(
        rows=sum(_row_count(path) for path in paths),
        measured=len(prompts),
        mean_prompt=sum(prompts) / len(prompts),
        mean_response=sum(responses) / len(responses) if full else None,
        longest=max(
            a + b for a, b in zip(prompts, responses if full else [0] * len(prompts), strict=True)
        ),
        exact=tokenizer is not None,
    )


def _paths(files: str | list[str]) -> list[Path]:
    found: list[Path] = []
    for name in [files] if isinstance(files, str) else files:
        root = Path(name).expanduser()
        if root.is_dir():
            matches = sorted([*root.rglob("*.jsonl"), *root.rglob("*.parquet")])
        else:
            matches = [Path(match) for match in sorted(glob.glob(str(root)))]
        if not matches:
            raise UserError(
                f"data.train_files: {name} is not there; give a JSONL or Parquet file, a folder or "
                "a glob"
            )
        found += matches
    return found


def _rows(paths: list[Path]) -> Iterator[tuple[Path, dict[str, Any]]]:
    for path in paths:
        if path.suffix == ".parquet":
            import pyarrow.parquet as parquet

            for batch in parquet.ParquetFile(path).iter_batches(batch_size=256):
                yield from ((path, row) for row in batch.to_pylist())
            continue
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if not line.strip():
                    continue
                try:
                    row = json.loads(line)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: no JSON ({error})") from error
                if not isinstance(row, dict):
                    raise UserError(f"{path}, line {number}: a row must be an object {{...}}")
                yield path, row


def _row_count(path: Path) -> int:
    if path.suffix == ".parquet":
        import pyarrow.parquet as parquet

        return int(parquet.ParquetFile(path).metadata.num_rows)
    with path.open("rb") as file:
        return sum(1 for line in file if line.strip())


def _text(value: Any) -> str:
    """The text of a field: itself, or the contents of chat messages."""
    if isinstance(value, list):
        return "\n".join(
            str(m.get("content", "")) if isinstance(m, dict) else str(m) for m in value
        )
    return str(value)


def _counter(tokenizer: Path | None) -> Any:
    if tokenizer is None:
        return lambda text: max(1, round(len(text) / CHARACTERS_PER_TOKEN))
    from tokenizers import Tokenizer

    encode = Tokenizer.from_file(str(tokenizer)).encode
    return lambda text: len(encode(text, add_special_tokens=False).ids)
