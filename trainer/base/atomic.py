"""Small files are replaced in one step, here and nowhere else."""

from __future__ import annotations

import json
import os
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from trainer.base.full_disk import patiently


def write_bytes(path: Path, data: bytes, *, durable: bool = True, wait_s: float = 0.0) -> None:
    """Replace ``path`` in one step: a reader sees the old or the new contents, never a part of
    them.

    The file is readable by its owner alone (mode 0600). ``durable``: it also survives a power cut;
    False for files that are rewritten every few seconds, or that mean nothing after a restart.
    ``wait_s``: how long to wait for room on a full disk (``full_disk.patiently``). Raises OSError;
    the old file is then untouched and no temporary file is left.
    """
    if wait_s > 0:
        patiently(partial(write_bytes, path, data, durable=durable), str(path), wait_s=wait_s)
        return
    # mkstemp gives mode 0600. The temporary file must be on the same file system as the target.
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            if durable:
                os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
    if durable:
        sync_folder(path.parent)


def write_text(path: Path, text: str, *, durable: bool = True, wait_s: float = 0.0) -> None:
    """Replace ``path`` by ``text`` in UTF-8, as ``write_bytes`` does."""
    write_bytes(path, text.encode(), durable=durable, wait_s=wait_s)


def write_json(path: Path, value: Any, *, durable: bool = True, wait_s: float = 0.0) -> None:
    """Replace ``path`` by ``value`` as indented JSON with sorted keys, as ``write_bytes`` does."""
    text = json.dumps(value, indent=1, sort_keys=True) + "\n"
    write_text(path, text, durable=durable, wait_s=wait_s)


def sync_folder(folder: Path) -> None:
    """Make the names in ``folder`` survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
