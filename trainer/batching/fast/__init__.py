"""The planner's inner loops, compiled by numba where it is installed; plain Python makes the same
plans without it.

numba is imported by the first plan that is large enough, not before: it takes half a second and
some memory. It keeps what it compiled beside the sources or, where they can't be written, in the
user's own cache folder (NUMBA_CACHE_DIR names another, which must be the user's own: what lies
there is run). Where it can keep nothing, Python plans.
"""

from __future__ import annotations

import sys
from functools import cache
from importlib import import_module
from types import ModuleType

FROM, FEW = 64, 12
"""Units from which compiled loops are worth loading (fewer are planned in a few milliseconds
anyway), and worth calling once they are loaded.
"""


@cache
def load(name: str) -> ModuleType | None:
    """Module ``name`` of this package, or None without numba, or without a folder of one's own for
    what it compiles.
    """
    try:
        return import_module(f"{__name__}.{name}")
    except (ImportError, RuntimeError):
        return None


def loops(name: str, units: int) -> ModuleType | None:
    """The compiled loops ``name`` for so many units, or None where plain Python does."""
    wanted = units >= FROM or (units >= FEW and f"{__name__}.jit" in sys.modules)
    return load(name) if wanted else None
