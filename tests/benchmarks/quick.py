"""Runs the short form of a benchmark, as the test suite does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TRIES = 3


def run_quick(
    name: str, folder: Path, *more: str, env: dict[str, str] | None = None
) -> dict[str, Any]:
    """The JSON that ``python -m benchmarks.NAME --quick`` writes in a process of its own.

    Its exit code must agree with its checks, and all but the clocked ones must hold: those are the
    bars of a machine that does nothing else.
    """
    out = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", "--quick", "--json", str(out), *more],
        env=os.environ | {"OMP_WAIT_POLICY": "PASSIVE"} | (env or {}),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode in (0, 1), done.stdout + done.stderr
    report: dict[str, Any] = json.loads(out.read_text())
    failed = [n for n, check in report["checks"].items() if not check["ok"]]
    assert done.returncode == bool(failed), done.stdout
    assert report["rows"]
    assert not [n for n in failed if not report["checks"][n]["clocked"]], done.stdout
    return report


def run_until(
    name: str, folder: Path, holds: Callable[[dict[str, Any]], bool], **options: Any
) -> dict[str, Any]:
    """The first of at most three reports for which ``holds``.

    Another program may slow down one run, but not all three.
    """
    for _ in range(TRIES):
        report = run_quick(name, folder, **options)
        if holds(report):
            return report
    raise AssertionError(report)


def not_absurd(report: dict[str, Any], slack: float = 2.0) -> bool:
    """Clocked checks may miss their bars by a factor of ``slack``."""
    clocked = [check for check in report["checks"].values() if check["clocked"]]
    return all(
        c["value"] <= c["bar"] * slack if c["at_most"] else c["value"] >= c["bar"] / slack
        for c in clocked
    )
