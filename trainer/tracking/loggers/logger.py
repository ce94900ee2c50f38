"""What a logger is: a view of a run in another program, made from the run's record."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol


@dataclass(frozen=True)
class LoggedRun:
    """The run as a logger may show it."""

    folder: Path
    project: str
    name: str
    group: str | None
    config: Mapping[str, Any]
    """The frozen settings, nested, without secrets."""
    id: str | None
    """What the logger called the run before; None for a run that it doesn't know."""


class Logger(Protocol):
    """One file of this folder each. Every method may raise anything and may be slow: it runs in a
    process of its own, and is called again later.
    """

    def __init__(self, run: LoggedRun) -> None:
        """Begin the run, or continue it where ``run.id`` is known."""

    @property
    def id(self) -> str:
        """Names the run to the logger; kept from attempt to attempt."""

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Take numbers of a step, recorded at ``time_s`` (seconds since 1970)."""

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Take texts, such as a validation's generations; all rows have the columns of the
        first.
        """

    def flush(self) -> None:
        """Return when all that was logged would outlive the process."""

    def close(self, exit_code: int | None) -> None:
        """End the attempt: 0 for a run that is done, 85 for one that is queued again, None for one
        that was killed.
        """


def numbers_of(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, NaN and infinities included; texts have no curve."""
    return {name: float(value) for name, value in metrics.items() if isinstance(value, int | float)}


def flat_config(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Settings by dotted keys: ``{"trainer": {"seed": 1}}`` becomes ``{"trainer.seed": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flat_config(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns)]
    lines += [[_cell(row.get(name)) for name in columns] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _cell(value: Any) -> str:
    text = "" if value is None else str(value)
    return text.replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
