"""The folder that keeps built-in models once they are made.

Any number of processes and nodes may want one at once, on a file system whose locks may not work. A
model is therefore built under another name and renamed when whole; the first rename decides, and
whoever loses it uses the winner's. A folder never changes once it has its name. It is verified each
time it is used (its list of files, their sizes and digests): one that is damaged is emptied for
good, and the model is made anew under the next name.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import torch.distributed as dist

from trainer.base import file_lock
from trainer.base.atomic import sync_folder, write_json
from trainer.base.errors import DISK_FULL, UserError
from trainer.base.home import expanded

FORMAT = 2
"""Of the folders; part of their names, so that versions of this file don't meet in one."""
FILES = "plimsoll-files.json"
"""Lists the files of a model with size and digest; written last."""
DAMAGED = "plimsoll-damaged"
"""Marks a folder that was damaged and emptied. It keeps its name, so that no other process takes it
for one that it may fill.
"""
NEEDED = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
"""Files without which no folder is a model with its tokenizer."""
LOCK_WAIT_S = 600.0
"""Longest wait for another process that makes the same model; then it is made here as well."""
LEFT_OVER_S = 86_400.0
"""Age at which a folder in which a model was being made is taken for one of a killed process."""


def cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    """``cache_dir``, else ``$PLIMSOLL_CACHE``, else ``~/.cache/plimsoll``.

    Raises UserError when there is no home folder.
    """
    chosen = cache_dir or os.environ.get("PLIMSOLL_CACHE") or "~/.cache/plimsoll"
    return expanded(Path(chosen), "set PLIMSOLL_CACHE to a folder for the built-in models")


def cached(
    root: Path,
    name: str,
    recipe: str,
    build: Callable[[Path], None],
    *,
    lock_wait_s: float = LOCK_WAIT_S,
) -> Path:
    """The folder that ``build`` makes from ``recipe``, verified; it is made when it isn't there.

    A process group must not exist yet when it has to be made: transformers writes a model on rank 0
    alone. Raises UserError when the cache can't be read or written.
    """
    base = f"{name}-{hashlib.sha256(f'{FORMAT} {recipe}'.encode()).hexdigest()[:12]}"
    try:
        folder = _usable(root, base)
        if folder is None:
            root.mkdir(mode=0o700, parents=True, exist_ok=True)
            with _locked(root / f".{base}.lock", lock_wait_s):
                folder = _usable(root, base) or _make(root, base, name, build)
    except OSError as e:
        full = "free space there, or " if e.errno in DISK_FULL else ""
        raise UserError(
            f"cannot make builtin:{name} in the cache {root}: {e.strerror or e}; "
            f"{full}set PLIMSOLL_CACHE to a folder you can write to"
        ) from e
    return folder


def damage(folder: Path) -> str | None:
    """What is wrong with the model in ``folder``; None when every file is as it was written.

    Raises OSError when a file can't be read, which says nothing about the model.
    """
    try:
        listed = json.loads((folder / FILES).read_bytes())
        for file, (size, digest) in listed.items():
            path = folder / file
            if path.stat().st_size != size or _digest(path) != digest:
                return f"{file} is not what was written"
    except FileNotFoundError as e:
        return f"{Path(e.filename).name} is missing"
    except NotADirectoryError:
        return "it is no folder"
    except (ValueError, TypeError, AttributeError):
        return f"{FILES} is damaged"
    missing = sorted(set(NEEDED) - set(listed))
    return f"{missing[0]} is missing" if missing else None


def _names(root: Path, base: str) -> Iterator[Path]:
    """The names under which a model may lie, in the order in which they are tried."""
    yield root / base
    for k in count(1):
        yield root / f"{base}.{k}"


def _usable(root: Path, base: str) -> Path | None:
    """The first whole folder. Those before it are damaged, and emptied."""
    for folder in _names(root, base):
        if not folder.exists():
            return None
        if (folder / DAMAGED).exists():
            continue
        wrong = damage(folder)
        if wrong is None:
            return folder
        _empty(folder, wrong)
    raise AssertionError("there is always another name")


def _empty(folder: Path, wrong: str) -> None:
    """Mark ``folder`` as damaged and free its space. What can't be deleted stays: it is not used.

    An empty folder gets no mark, since another process may rename its model onto it just now.
    """
    if not folder.is_dir() or not any(folder.iterdir()):
        return
    with contextlib.suppress(OSError):
        (folder / DAMAGED).write_text(f"{wrong}; the model was made anew under another name\n")
        for file in folder.iterdir():
            if file.name != DAMAGED:
                file.unlink()


def _make(root: Path, base: str, name: str, build: Callable[[Path], None]) -> Path:
    """Build the model and give it the first name that is free; another process's when that one was
    faster.
    """
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(f"builtin:{name} must be made before there is a process group")
    _delete_left_over(root, f".{name}-")
    work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        _build(build, work)
        _list_files(work)
        wrong = damage(work)
        if wrong is not None:
            raise RuntimeError(f"builtin:{name} was made incompletely: {wrong}")
        for folder in _names(root, base):
            with contextlib.suppress(OSError):  # taken, unless the folder is empty
                work.rename(folder)
                sync_folder(root)
                return folder
            if not folder.exists():
                raise OSError(f"{work} can't be renamed to {folder}")
            if not (folder / DAMAGED).exists() and damage(folder) is None:
                return folder
    finally:
        shutil.rmtree(work, ignore_errors=True)
    raise AssertionError("there is always another name")


def _build(build: Callable[[Path], None], work: Path) -> None:
    """Call ``build``. safetensors and tokenizers raise errors of their own for a failed write, with
    the system's number in the text: they become the OSError that they stand for.
    """
    try:
        build(work)
    except OSError:
        raise
    except Exception as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        code = int(number[1])
        raise OSError(code, os.strerror(code), str(work)) from error


def _delete_left_over(root: Path, prefix: str) -> None:
    for folder in root.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.is_dir() and time.time() - folder.stat().st_mtime > LEFT_OVER_S:
                shutil.rmtree(folder)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _list_files(folder: Path) -> None:
    """Write the list of files that ``damage`` compares with, and make all of them durable."""
    listed = {}
    for path in sorted(folder.iterdir()):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        listed[path.name] = [path.stat().st_size, _digest(path)]
    write_json(folder / FILES, listed)


@contextlib.contextmanager
def _locked(path: Path, wait_s: float) -> Iterator[None]:
    """Hold the lock ``path``, so that only one process builds.

    It saves work and decides nothing: where locks don't work, or the holder takes longer than
    ``wait_s`` seconds, the body runs without it.
    """
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):  # too long, another user's lock, a cache only read
            stack.enter_context(file_lock.locked(path, wait_s))
        yield
