"""Memory and sorting for the loops, in plain Python; numba gets arrays instead.

``trainer.batching.loops.compiler`` replaces each function of this module, and ``bisect``, by a
version for arrays when it compiles a loop.
"""

from __future__ import annotations

FloatList = list[float]
"""A list in plain Python, a float64 array in compiled code."""
IntList = list[int]
"""A list in plain Python, an int64 array in compiled code."""


def floats(count: int) -> FloatList:
    """``count`` zeros."""
    return [0.0] * count


def integers(count: int) -> IntList:
    """``count`` zeros."""
    return [0] * count


def ascending(values: FloatList) -> IntList:
    """Indices that sort ``values`` in rising order; equal values keep their order."""
    return sorted(range(len(values)), key=values.__getitem__)


def descending(values: FloatList) -> IntList:
    """Indices that sort ``values`` in falling order; equal values keep their order."""
    return sorted(range(len(values)), key=values.__getitem__, reverse=True)
