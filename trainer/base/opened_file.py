"""A data file that is read at random while a run lasts: whether it is rewritten meanwhile."""

from __future__ import annotations

import os
from pathlib import Path

import xxhash

from trainer.base.errors import UserError

WHOLE_BYTES = 64 << 20
"""Bytes up to which a file is read whole for its digest."""
_PIECE = 1 << 20


class OpenedFile:
    """A file as it was when it was opened.

    A file that is replaced by another one of its name (written elsewhere and renamed) goes on being
    read as it was. One that is rewritten in place is noticed by ``require_unchanged``: its rows
    would be others, and memory that is mapped beyond its new end can't be read at all (SIGBUS).
    Forked processes may share one.
    """

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._file = path.open("rb", buffering=0)
        status = os.fstat(self._file.fileno())
        self.size = status.st_size
        self.mtime_ns = status.st_mtime_ns
        self._digest: str | None = None

    def read(self, start: int, length: int) -> bytes:
        """``length`` bytes from ``start`` on, fewer at the end of the file."""
        parts = []
        while length > 0:
            part = os.pread(self._file.fileno(), length, start)
            if not part:
                break
            parts.append(part)
            start += len(part)
            length -= len(part)
        return b"".join(parts)

    def digest(self) -> str:
        """Digest of size and content, not of the name; of evenly spaced pieces when the file is
        larger than 64 MiB. Computed once.
        """
        if self._digest is None:
            self._digest = self._compute_digest()
        return self._digest

    def require_unchanged(self) -> None:
        """Raise UserError when the file was rewritten since it was opened. Costs a microsecond."""
        status = os.fstat(self._file.fileno())
        if (status.st_size, status.st_mtime_ns) == (self.size, self.mtime_ns):
            return
        # Touching a file changes nothing in it.
        known = self._digest is not None
        if status.st_size == self.size and known and self._compute_digest() == self._digest:
            self.mtime_ns = status.st_mtime_ns
            return
        sizes = f"{self.size} bytes before, {status.st_size} now"
        if status.st_size == self.size:
            sizes = "other content of the same size"
        raise UserError(
            f"{self.path} was rewritten while this run reads it ({sizes}). Put back what it held, "
            "then type the same command; write new data to a new file"
        )

    def _compute_digest(self) -> str:
        state = xxhash.xxh3_128(str(self.size).encode())
        if self.size <= WHOLE_BYTES:
            starts = list(range(0, self.size, _PIECE))
        else:
            pieces = WHOLE_BYTES // _PIECE
            starts = [(self.size - _PIECE) * k // (pieces - 1) for k in range(pieces)]
        for start in starts:
            state.update(self.read(start, _PIECE))
        return str(state.hexdigest())
