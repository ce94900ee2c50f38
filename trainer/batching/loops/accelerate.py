"""Which form of a loop runs: compiled by numba, or plain Python, which gives the same plans.

numba is imported by the first plan that is large enough, not before: loading takes half a second
and 100 MB. Without numba, or without a private folder for what it compiles, Python plans.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np

COMPILER = "trainer.batching.loops.compiler"
COMPILE_FROM = 32
"""Pieces from which numba is worth loading; fewer are planned in a millisecond anyway."""

Loop = Callable[..., Any]


def accelerated(loop: Loop, pieces: int) -> Loop:
    """``loop`` for numpy arrays, in the fastest form for a plan of so many pieces.

    ``loop`` is a function of this package over lists. Both forms take and return arrays.
    """
    if pieces >= COMPILE_FROM or COMPILER in sys.modules:
        compiled = compiled_loops()
        if compiled is not None:
            return compiled[loop]
    return interpreted(loop)


@cache
def compiled_loops() -> dict[Loop, Loop] | None:
    """The compiled form of each loop; None without numba or a private folder for its files."""
    try:
        loops: dict[Loop, Loop] = import_module(COMPILER).LOOPS
        return loops
    except (ImportError, RuntimeError, OSError):
        return None


@cache
def interpreted(loop: Loop) -> Loop:
    """``loop`` in plain Python: arrays become lists, and lists that it returns become arrays."""

    def run(*args: Any) -> Any:
        lists = [arg.tolist() if isinstance(arg, np.ndarray) else arg for arg in args]
        result = loop(*lists)
        return tuple(map(_as_array, result)) if isinstance(result, tuple) else _as_array(result)

    return run


def _as_array(value: Any) -> Any:
    """A list as an array; an empty one holds indices."""
    if not isinstance(value, list):
        return value
    return np.array(value) if value else np.zeros(0, np.int64)
