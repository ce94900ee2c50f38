"""Trackio: its database on this machine (TRACKIO_DIR), or the Space that TRACKIO_SPACE_ID names."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.tracking.loggers.logger import LoggedRun


def check(env: Mapping[str, str]) -> str | None:
    """What keeps the logger from starting: nothing."""
    return None


class TrackioLogger:
    """See :class:`trainer.tracking.loggers.logger.Logger`."""

    def __init__(self, run: LoggedRun) -> None:
        """Begin the run, or continue the one of that name in the project."""
        self._project = run.project
        self._group = run.group
        self._config = dict(run.config)
        self._name = run.id or _unused_name(run)
        self._run: Any = self._init("never" if run.id is None else "allow")

    @property
    def id(self) -> str:
        """The name by which Trackio continues a run."""
        return self._name

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Hand the numbers to Trackio's thread."""
        self._opened().log(dict(metrics), step=step)

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Log a table."""
        import pandas
        import trackio

        table = trackio.Table(dataframe=pandas.DataFrame([dict(row) for row in rows]))
        self._opened().log({"val/generations": table}, step=step)

    def flush(self) -> None:
        """Wait until Trackio has written everything, which only the end of a session tells."""
        if self._run is not None:
            self._run.finish()
            self._run = None

    def close(self, exit_code: int | None) -> None:
        """End the session; Trackio keeps no exit code."""
        self.flush()

    def _opened(self) -> Any:
        if self._run is None:
            self._run = self._init("allow")
        return self._run

    def _init(self, resume: str) -> Any:
        import trackio

        return trackio.init(
            project=self._project,
            name=self._name,
            group=self._group,
            config=self._config,
            resume=resume,
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )


def _unused_name(run: LoggedRun) -> str:
    """The run's name, with four letters after it where the project has a run of that name: Trackio
    continues the newest run of a name.
    """
    import trackio

    try:
        taken = {str(other.name) for other in trackio.Api().runs(run.project)}
    except Exception:  # the project is new
        taken = set()
    return run.name if run.name not in taken else f"{run.name}-{secrets.token_hex(2)}"
