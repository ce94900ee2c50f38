"""``manifest.json``: the files of a committed checkpoint, their sizes and checksums.

A folder without a manifest that verifies is no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from trainer.base.errors import Failure, UserError
from trainer.checkpoint.store.file_writing import CHECKSUM_BYTES, file_digest

NAME = "manifest.json"
FORMAT = 2
"""Increased when a reader of the older format would misread a folder."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Contents of ``manifest.json``."""

    step: int
    attempt: int
    world_size: int
    zero_stage: int
    config_hash: str
    created: float
    """Seconds since the epoch."""
    metric: float | None = None
    """The value that ``keep_best`` compares."""
    metric_name: str | None = None
    """The name of that metric."""
    healthy: bool = True
    """False: the optimizer steps before it were skipped, their gradients not being finite."""
    files: dict[str, list[Any]] = field(default_factory=dict)
    """Relative path -> [bytes, [xxh3-128 in hex of each ``chunk_bytes``, or of what is left]]."""
    about: dict[str, Any] = field(default_factory=dict)
    """Anything for people: versions, W&B id. Nothing is read back from here."""
    format: int = FORMAT
    chunk_bytes: int = CHECKSUM_BYTES

    @property
    def nbytes(self) -> int:
        """Total size of the files, bytes."""
        return sum(int(size) for size, _ in self.files.values())

    def encode(self) -> bytes:
        """JSON that carries its own digest."""
        body = asdict(self)
        if self.healthy:
            del body["healthy"]  # earlier versions, which don't know it, read this one too
        return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True).encode()


MISSING = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
"""Errors that say that a file is not there. After any other one a file may be whole."""


class DamagedError(Exception):
    """A folder is no whole checkpoint; the message says what is wrong with it."""


def read(folder: Path) -> Manifest:
    """The manifest of ``folder``.

    Raises DamagedError when it is missing or damaged, UserError for a newer format, OSError when it
    can't be read.
    """
    try:
        data = (folder / NAME).read_bytes()
    except MISSING as error:
        raise DamagedError(f"{folder.name}/{NAME} is missing ({error.strerror})") from error
    return parse(data, str(folder))


def parse(data: bytes, folder: str) -> Manifest:
    """The manifest encoded in ``data``; ``folder`` is for messages.

    Raises DamagedError when it is damaged, UserError for a newer format.
    """
    try:
        body = json.loads(data)
        stored = body.pop("digest")
    except (ValueError, RecursionError, KeyError, AttributeError, TypeError) as error:
        raise DamagedError(f"{NAME} can't be read ({error})") from error
    if stored != _digest(body):
        raise DamagedError(f"{NAME} doesn't match its own digest")
    if body.get("format") == 1:
        body = _from_format_1(body)
    if body.get("format") != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {body.get('format')}, this version reads {FORMAT}; "
            "continue it with the version of plimsoll that wrote it, or export its weights there "
            f"with python -m trainer.export {folder} --out DIR"
        )
    return Manifest(**body)


def problems(folder: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """Messages about missing files, wrong sizes and wrong contents; empty for a whole checkpoint.

    ``share`` = (i, n): read the contents of every n-th chunk from the i-th on; sizes are always
    compared. Raises OSError, with its file, for one that is there and can't be read.
    """
    index, count = share
    found: list[str] = []
    chunk_number = 0
    for name, (size, digests) in sorted(manifest.files.items()):
        path = folder / name
        try:
            actual_size = path.stat().st_size
            if actual_size != size:
                found.append(f"{name} has {actual_size} bytes instead of {size}")
                continue
            starts = range(0, size, manifest.chunk_bytes)
            for start, digest in zip(starts, digests, strict=True):
                chunk_number += 1
                if chunk_number % count != index:
                    continue
                if file_digest(path, start, manifest.chunk_bytes) != digest:
                    end = min(start + manifest.chunk_bytes, size)
                    found.append(f"{name} doesn't match its checksum in bytes {start} to {end}")
        except MISSING as error:
            found.append(f"{name}: {error.strerror}")
        except OSError as error:
            error.filename = str(path)  # an error of reading has none
            raise
    return found


def unreadable(error: OSError) -> UserError | Failure:
    """The error for a file of a checkpoint that can't be read now, and may be whole."""
    file = error.filename or "a file of the checkpoint"
    text = (
        f"{file} can't be read ({error.strerror or error}). That is no damage, and nothing was "
        "changed"
    )
    if isinstance(error, PermissionError):
        return UserError(
            f"{text}. Have this user given access (chmod u+rwX, or chown by its owner), then type "
            "the same command"
        )
    return Failure(
        f"{text}. The machine's connection to the disk or the disk itself fails: type the same "
        "command again, on another node if that does not help; to give the checkpoint up and go "
        "back to the one before, rename its folder"
    )


def _from_format_1(body: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had one checksum per file: read it as a single chunk."""
    files = {
        name: [size, [digest] if size else []] for name, (size, digest) in body["files"].items()
    }
    largest = max((size for size, _ in files.values()), default=0)
    return {**body, "format": FORMAT, "files": files, "chunk_bytes": max(1, largest)}


def _digest(body: Mapping[str, Any]) -> str:
    return str(xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode()))
