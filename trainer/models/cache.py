"""The folder that keeps built-in models once they are made; several ranks may make one at once."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from trainer.base.errors import UserError


def cache_root(cache_dir: str | os.PathLike[str] | None) -> Path:
    """``cache_dir``, else ``$PLIMSOLL_CACHE``, else ``~/.cache/plimsoll``."""
    return Path(cache_dir or os.environ.get("PLIMSOLL_CACHE") or "~/.cache/plimsoll").expanduser()


def cached(root: Path, name: str, recipe: str, build: Callable[[Path], None]) -> Path:
    """The folder that ``build`` makes from ``recipe``; it is made when it isn't there.

    It is made under another name and renamed when whole, so that no process sees half of it and the
    first to finish wins. Raises :class:`UserError` when the cache can't be written.
    """
    final = root / f"{name}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}"
    if final.is_dir():
        return final
    try:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    except OSError as e:
        raise UserError(
            f"cannot make builtin:{name} in the cache {root}: {e.strerror}. "
            "Set PLIMSOLL_CACHE to a folder you can write to"
        ) from e
    try:
        try:
            build(work)
        except OSError as e:
            raise UserError(
                f"cannot write builtin:{name} to the cache {root}: {e.strerror or e}"
            ) from e
        try:
            work.rename(final)
        except OSError:
            if not final.is_dir():
                raise
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return final
