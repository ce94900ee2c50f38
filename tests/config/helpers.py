"""Shared by the tests of the settings."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.config import load

REPO = Path(__file__).resolve().parents[2]


def minimal_settings(**dotted: Any) -> dict[str, Any]:
    """The smallest complete settings, and ``a__b=value`` for ``a.b``."""
    tree: dict[str, Any] = {}
    base = {
        "data.task": "arithmetic",
        "actor_rollout_ref.model.path": "builtin:tiny",
        "actor_rollout_ref.rollout.n": 8,
    }
    for key, value in {**base, **{k.replace("__", "."): v for k, v in dotted.items()}}.items():
        put(tree, key, value)
    return tree


def put(tree: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    *path, name = key.split(".")
    inner = tree
    for part in path:
        inner = inner.setdefault(part, {})
    inner[name] = value
    return tree


def problems(tree: dict[str, Any]) -> list[str]:
    """The problems that ``load`` reports."""
    try:
        load(tree)
    except UserError as error:
        lines = str(error).splitlines()
        return [line.removeprefix("  - ") for line in (lines[1:] if len(lines) > 1 else lines)]
    return []


def python_m(
    module: str, *argv: str, cwd: Path, repo: Path = REPO, **env: str
) -> subprocess.CompletedProcess[str]:
    """``python -m module argv`` in ``cwd``."""
    clean = {
        k: v
        for k, v in os.environ.items()
        if k not in ("HYDRA_FULL_ERROR", "PLIMSOLL_WORKER_MODULE")
    }
    return subprocess.run(
        [sys.executable, "-m", module, *argv],
        cwd=cwd,
        env={**clean, "PYTHONPATH": str(repo), **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
