"""``manifest.json``: what a committed checkpoint consists of. A folder without one that verifies is
no checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from xxhash import xxh3_128_hexdigest

from trainer.base.errors import UserError
from trainer.checkpoint.store.disk import CHECKED, digest_of

NAME = "manifest.json"
FORMAT = 2
"""Raised when a reader of the older number would misread a folder."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """``files``: relative path -> [bytes, [xxh3-128 in hex of each ``chunk_bytes``, or of what is
    left]].
    """

    step: int
    attempt: int
    world_size: int
    zero_stage: int
    config_hash: str
    created: float
    """Seconds since the epoch."""
    metric: float | None = None
    """What ``keep_best`` compares."""
    metric_name: str | None = None
    """Of what it is the value."""
    files: dict[str, list[Any]] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)
    """Anything for people: versions, W&B id. Nothing is read back from here."""
    format: int = FORMAT
    chunk_bytes: int = CHECKED

    @property
    def nbytes(self) -> int:
        """Size of all files."""
        return sum(int(size) for size, _ in self.files.values())

    def encode(self) -> bytes:
        """JSON that carries its own digest."""
        body = asdict(self)
        return json.dumps({**body, "digest": _digest(body)}, indent=1, sort_keys=True).encode()


class Damaged(Exception):
    """Not a whole checkpoint; the message says what is wrong with it."""


def read(folder: Path) -> Manifest:
    """The manifest of ``folder``. Raises Damaged when there is none that is whole, UserError for a
    newer format.
    """
    try:
        data = (folder / NAME).read_bytes()
    except OSError as error:
        raise Damaged(f"{folder.name}/{NAME} can't be read ({error.strerror})") from error
    return parse(data, str(folder))


def parse(data: bytes, folder: str) -> Manifest:
    """The manifest in ``data``, which lies in ``folder``. Raises as ``read`` does."""
    try:
        body = json.loads(data)
        stored = body.pop("digest")
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{NAME} can't be read ({error})") from error
    if stored != _digest(body):
        raise Damaged(f"{NAME} doesn't match its own digest")
    if body.get("format") == 1:
        body = _from_format_1(body)
    if body.get("format") != FORMAT:
        raise UserError(
            f"{folder} has checkpoint format {body.get('format')}, this version reads {FORMAT}; "
            "continue it with the version of plimsoll that wrote it, or export its weights there "
            "with "
            f"python -m trainer.export {folder} --out DIR"
        )
    return Manifest(**body)


def problems(folder: Path, manifest: Manifest, share: tuple[int, int] = (0, 1)) -> list[str]:
    """What is wrong with the files: missing, of another size, of other contents. Empty: nothing.

    ``share`` = (i, n): read the contents of every n-th chunk from the i-th on; sizes are always
    compared.
    """
    found, number, step = [], 0, manifest.chunk_bytes
    for name, (size, digests) in sorted(manifest.files.items()):
        path = folder / name
        try:
            have = path.stat().st_size
            if have != size:
                found.append(f"{name} has {have} bytes instead of {size}")
                continue
            for start, digest in zip(range(0, size, step), digests, strict=True):
                number += 1
                if number % share[1] == share[0] and digest_of(path, start, step) != digest:
                    found.append(
                        f"{name} doesn't match its checksum in bytes {start} to "
                        f"{min(start + step, size)}"
                    )
        except OSError as error:
            found.append(f"{name}: {error.strerror}")
    return found


def _from_format_1(body: dict[str, Any]) -> dict[str, Any]:
    """Format 1 had one checksum for a whole file: a single chunk."""
    files = {
        name: [size, [digest] if size else []] for name, (size, digest) in body["files"].items()
    }
    largest = max((size for size, _ in files.values()), default=0)
    return {**body, "format": FORMAT, "files": files, "chunk_bytes": max(1, largest)}


def _digest(body: Mapping[str, Any]) -> str:
    return str(xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode()))
