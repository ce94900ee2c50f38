"""The planner's inner loops: plain Python over lists, which numba compiles for arrays.

There is one source. ``accelerate.py`` decides which form of a loop runs, ``compiler.py`` compiles
and keeps the result on disk, ``primitives.py`` and ``array_primitives.py`` hold what lists and
arrays do differently. Read ``best_fit.py``, ``lightest_fit.py``, ``multifit.py`` and ``rows.py``
for first plans, then ``bins.py``, ``swaps.py``, ``exchange.py`` and ``refine.py`` for their
refinement.
"""

from __future__ import annotations

from trainer.batching.loops.accelerate import COMPILE_FROM, accelerated

__all__ = ["COMPILE_FROM", "accelerated"]
