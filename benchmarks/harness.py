"""What all benchmarks share: a table on the screen, a JSON file, and an exit code that is 1 when a
bar is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

SHARED = Path(os.environ.get("PLIMSOLL_SHARED", Path(__file__).resolve().parents[2] / "shared"))
"""Folder of data that the project does not hold (GSM8K); ``PLIMSOLL_SHARED`` overrides it."""
LENGTHS = Path(__file__).resolve().parent / "lengths"
"""Folder of the length traces."""


def timed(action: Callable[[], object]) -> float:
    """Seconds that ``action`` takes."""
    began = perf_counter()
    action()
    return perf_counter() - began


class Report:
    """Rows and checks of one benchmark.

    A row is a dict; every row has the same keys, the columns of the table.
    """

    def __init__(self, title: str) -> None:
        self.title = title
        self.rows: list[dict[str, Any]] = []
        self.checks: dict[str, dict[str, Any]] = {}
        self.extra: dict[str, Any] = {}

    def add(self, **row: Any) -> None:
        """Add a row."""
        self.rows.append(row)

    def check(
        self, name: str, value: float, bar: float, *, at_most: bool = False, clocked: bool = False
    ) -> bool:
        """Hold ``value`` to ``bar``: at least, or ``at_most``. A nan never holds.

        ``clocked``: the value comes from a clock and depends on what else the machine does, so the
        test suite holds it to far less than the bar.
        """
        ok = value <= bar if at_most else value >= bar
        self.checks[name] = {
            "value": value,
            "bar": bar,
            "ok": bool(ok),
            "at_most": at_most,
            "clocked": clocked,
        }
        return bool(ok)

    def finish(
        self,
        args: argparse.Namespace,
        *,
        shown: Sequence[dict[str, Any]] | None = None,
        others: Sequence[Report] = (),
    ) -> int:
        """Print the table (``shown``, or all rows) and the checks, write the JSON; the exit code.

        ``others``: further tables of the same command; in the file their rows and checks follow.
        """
        for other in others:
            other._show(other.rows)
        self._show(self.rows if shown is None else shown)
        for other in others:
            self.rows += other.rows
            self.checks |= other.checks
        if args.json:
            body = {"title": self.title, "rows": self.rows, "checks": self.checks, **self.extra}
            Path(args.json).parent.mkdir(parents=True, exist_ok=True)
            Path(args.json).write_text(json.dumps(body, indent=1, sort_keys=True) + "\n")
        return 0 if all(c["ok"] for c in self.checks.values()) else 1

    def _show(self, rows: Sequence[dict[str, Any]]) -> None:
        console = Console(width=None if sys.stdout.isatty() else 200)
        if rows:
            table = Table(title=self.title, title_justify="left")
            for name in rows[0]:
                number = isinstance(rows[0][name], (int, float))
                table.add_column(name, justify="right" if number else "left", no_wrap=True)
            for row in rows:
                table.add_row(*(_cell(v) for v in row.values()))
            console.print(table)
        for name, check in self.checks.items():
            mark = "[green]holds[/green]" if check["ok"] else "[red]FALLS SHORT[/red]"
            console.print(
                f"{mark}  {name}: {_cell(check['value'])} (bar {_cell(check['bar'])})",
                highlight=False,
            )


def arguments(
    description: str, argv: Sequence[str] | None = None, **flags: dict[str, Any]
) -> argparse.Namespace:
    """``--quick``, ``--json FILE`` and further ``flags`` (name -> keywords of add_argument)."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--quick", action="store_true", help="a small part of it, for a test run")
    parser.add_argument("--json", metavar="FILE", help="also write rows and checks there")
    for name, keywords in flags.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **keywords)
    return parser.parse_args(argv)


def length_trace(name: str) -> Path:
    """The CSV file of a length trace. Raises SystemExit when there is none of that name."""
    path = LENGTHS / f"{name}.csv"
    if not path.is_file():
        known = ", ".join(sorted(file.stem for file in LENGTHS.glob("*.csv")))
        raise SystemExit(f"there is no length trace {name}: {known}")
    return path


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4f}" if abs(value) < 1.5 else f"{value:,.1f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
