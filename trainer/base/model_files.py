"""Whether the files of a Hugging Face model folder are whole: a copy that was cut short, or a file
that is another, is named before a job waits in the queue for it.

Imports no torch. What a file means is left to transformers.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.json_files import open_regular, read_regular

INDEX = "model.safetensors.index.json"
"""Lists which file of several holds which weights."""
GENERATION = "generation_config.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"),
    *("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja"),
)
"""Of which a tokenizer has some."""
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
"""Of which a tokenizer needs one."""
OBJECTS = (
    *("config.json", GENERATION, INDEX, "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "chat_template.json"),
    "adapter_config.json",
)
"""Files that hold one JSON object, where they are there."""
TEXTS = ("merges.txt", "vocab.txt", "chat_template.jinja")
MOST_BYTES = 1 << 28
"""Of a file that is read whole; the largest tokenizers have 35 MB."""
MOST_HEADER_BYTES = 100_000_000
"""The format's own limit."""


def require_whole_files(folder: Path, key: str) -> None:
    """Raise UserError naming ``key`` and the file when one in ``folder`` was cut short, is another,
    or is missing beside the index that lists it.
    """
    for name in OBJECTS:
        if _is_there(folder / name):
            _read_object(folder / name, key)
    for name in TEXTS:
        if _is_there(folder / name):
            _read_text(folder / name, key)
    if _is_there(folder / INDEX) and not _is_there(folder / "model.safetensors"):
        _require_listed(folder, key)
    for path in sorted(folder.glob("*.safetensors")):
        _require_whole_weights(path, key)


def tokenizer_advice(folder: Path) -> str:
    """What to do about a tokenizer in ``folder`` that can't be used, for a message."""
    if not folder.is_dir():
        return "remove it from the cache of the hub (HF_HOME), to get it anew"
    files = [name for name in TOKENIZER_FILES if _is_there(folder / name)]
    if not set(files) & set(VOCABULARIES):
        return "copy tokenizer.json, which holds the vocabulary, there"
    return f"copy its files ({', '.join(files)}) anew from where the model came from"


def _is_there(path: Path) -> bool:
    return path.is_symlink() or path.exists()


def _wrong(path: Path, key: str, problem: str) -> UserError:
    return UserError(f"{key}: {path} {problem}: copy it anew from where the model came from")


def _read_text(path: Path, key: str) -> str:
    try:
        return read_regular(path, MOST_BYTES).decode()
    except OSError as error:
        raise _wrong(path, key, f"can't be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise _wrong(path, key, f"is no text (byte {error.start} is no UTF-8)") from error


def _read_object(path: Path, key: str) -> dict[str, Any]:
    try:
        value = json.loads(_read_text(path, key))
    except (ValueError, RecursionError) as error:
        raise _wrong(path, key, f"is no whole JSON file ({error})") from error
    if not isinstance(value, dict):
        raise _wrong(path, key, "is no JSON object")
    return value


def _require_listed(folder: Path, key: str) -> None:
    """Each file that the index names lies in ``folder``."""
    index = folder / INDEX
    listed = _read_object(index, key).get("weight_map")
    if not isinstance(listed, dict) or not listed:
        raise _wrong(index, key, "lists no weights (weight_map)")
    files = set(listed.values()) if all(isinstance(v, str) for v in listed.values()) else {None}
    for name in sorted(files, key=str):
        if name is None or Path(name).name != name:
            raise _wrong(index, key, "names weights in other places than beside it")
        if not _is_there(folder / name):
            raise UserError(
                f"{key}: {folder} has no {name}, which {INDEX} lists: the copy is incomplete; copy "
                "that file too"
            )


def _require_whole_weights(path: Path, key: str) -> None:
    """The header of a safetensors file fits the file's size.

    Format: 8 bytes with the header's length, a JSON object of tensors with their ``data_offsets``,
    the data (huggingface.co/docs/safetensors).
    """
    try:
        with open_regular(path) as file:
            length = int.from_bytes(file.read(8), "little")
            header = file.read(min(length, MOST_HEADER_BYTES))
            size = file.seek(0, 2)
    except OSError as error:
        raise _wrong(path, key, f"can't be read ({error.strerror})") from error
    try:
        tensors = json.loads(header)
        ends = [t["data_offsets"][1] for name, t in tensors.items() if name != "__metadata__"]
        whole = 8 + length + max(ends, default=0)
    except (ValueError, RecursionError, TypeError, KeyError, IndexError, AttributeError) as error:
        raise _wrong(path, key, "is no safetensors file, or was cut short") from error
    if whole != size:
        raise _wrong(path, key, f"has {size} bytes where its header says {whole}")
