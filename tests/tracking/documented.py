"""The metric names that docs/metrics.md explains."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

DOC = Path(__file__).parents[2] / "docs" / "metrics.md"


def patterns() -> list[re.Pattern[str]]:
    names = re.findall(r"^\| `([^`]+)` \|", DOC.read_text(), re.MULTILINE)
    return [re.compile(re.escape(n).replace("NAME", ".+")) for name in names for n in expand(name)]


def expand(name: str) -> list[str]:
    """``a/{b,c}`` -> ``a/b``, ``a/c``."""
    parts = [
        p[1:-1].split(",") if p.startswith("{") else [p] for p in re.split(r"(\{[^}]*\})", name)
    ]
    return ["".join(choice) for choice in itertools.product(*parts)]


def undocumented(keys: set[str]) -> set[str]:
    """The ``keys`` that the page doesn't explain."""
    known = patterns()
    return {k for k in keys - {"step", "time"} if not any(p.fullmatch(k) for p in known)}
