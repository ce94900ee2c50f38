"""Compiles the loops with numba, once for each machine, and keeps the result on disk.

Importing this module raises ImportError without numba, and RuntimeError where no folder can keep
what is compiled or others own it. Compiled code is kept beside the sources or, where they can't be
written, in the user's cache folder (``NUMBA_CACHE_DIR`` names another, which must be the user's
own: what lies there is run).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from inspect import isfunction
from pathlib import Path
from types import ModuleType
from typing import Any

import numba
import xxhash
from numba.extending import register_jitable

from trainer.batching.loops import (
    array_primitives,
    best_fit,
    bins,
    exchange,
    lightest_fit,
    multifit,
    refine,
    rows,
    sums,
    swaps,
)

MODULES = (sums, best_fit, lightest_fit, multifit, rows, bins, swaps, exchange, refine)
CALLED_FROM_PYTHON = (
    best_fit.best_fit,
    best_fit.open_bins,
    best_fit.cut,
    lightest_fit.lightest_fit,
    multifit.deal,
    rows.fill_rows,
    sums.path,
    sums.shared_sums,
    refine.improve,
)
Loop = Callable[..., Any]


def make_callable(module: ModuleType) -> None:
    """Let compiled loops call the functions of ``module``, which become part of them."""
    for name, function in list(vars(module).items()):
        if isfunction(function) and function.__module__ == module.__name__:
            # Private helpers are small: as calls they would cost a tenth of the loops' time.
            register_jitable(forceinline=name.startswith("_"))(function)


def compiled(loop: Loop) -> Loop:
    """``loop`` by numba, compiled at its first call. Every sum keeps its order and nothing is
    fused, so that floats round as in Python.

    Raises RuntimeError where no folder can keep what is compiled, or others own it.
    """
    out = numba.njit(cache=True, no_cfunc_wrapper=True)(loop)
    folder = Path(out.stats.cache_path)
    require_private(folder)
    drop_outdated(folder)
    return out  # type: ignore[no-any-return]


def require_private(folder: Path) -> None:
    """Code is loaded from ``folder``: let nobody else write there. Beside the sources it is as safe
    as they are. Raises RuntimeError when it belongs to another user.
    """
    if folder.parent == Path(__file__).parent:
        return
    if folder.stat().st_uid != os.getuid():
        raise RuntimeError(f"{folder} belongs to another user")
    folder.chmod(0o700)


@cache
def drop_outdated(folder: Path) -> None:
    """Delete what ``folder`` holds of other sources of this package. numba itself looks at the file
    of the loop that is called from Python, not at those of the loops that are part of it.
    """
    sources = sorted(Path(__file__).parent.glob("*.py"))
    current = xxhash.xxh3_128_hexdigest(b"\0".join(s.read_bytes() for s in sources))
    mark = folder / "plimsoll-sources"
    if mark.exists() and mark.read_text() == current:
        return
    for source in sources:
        for file in folder.glob(f"{source.stem}.*.nb[ic]"):
            file.unlink(missing_ok=True)  # other ranks do the same at the same time
    new = mark.with_suffix(f".{os.getpid()}")
    new.write_text(current)
    new.replace(mark)


array_primitives.register()
for _module in MODULES:
    make_callable(_module)
LOOPS: dict[Loop, Loop] = {loop: compiled(loop) for loop in CALLED_FROM_PYTHON}
"""The compiled form of each loop that is called from Python."""
