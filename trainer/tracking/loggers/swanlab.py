"""SwanLab: online with SWANLAB_API_KEY, else files for ``swanlab sync`` in ``<run>/swanlab``;
SWANLAB_MODE and SWANLAB_LOG_DIR say otherwise, as in verl.
"""

from __future__ import annotations

import os
import secrets
import string
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.base.errors import EXIT_OK, EXIT_REQUEUE
from trainer.tracking.loggers.logger import LoggedRun, markdown_table

MODE = "SWANLAB_MODE"
MODES = {"cloud": "online", "cloud-only": "online"}
"""Names of older versions, and verl's default."""
KEY = "SWANLAB_API_KEY"
ID_LETTERS = 21


def check(env: Mapping[str, str]) -> str | None:
    """What keeps the logger from starting."""
    mode = env.get(MODE, "offline")
    if MODES.get(mode, mode) == "online" and not env.get(KEY):
        return f"{MODE}={mode} needs {KEY} in the environment; {MODE}=offline doesn't"
    return None


class SwanlabLogger:
    """See :class:`trainer.tracking.loggers.logger.Logger`."""

    def __init__(self, run: LoggedRun) -> None:
        """Begin the run, or continue the one with that id."""
        import swanlab

        letters = string.ascii_lowercase + string.digits
        self._id = run.id or "".join(secrets.choice(letters) for _ in range(ID_LETTERS))
        mode = os.environ.get(MODE) or ("online" if os.environ.get(KEY) else "offline")
        folder = os.environ.get("SWANLAB_LOG_DIR") or str(run.folder / "swanlab")
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self._swanlab = swanlab
        swanlab.init(
            project=run.project,
            name=run.name,
            group=run.group,
            config=dict(run.config),
            mode=MODES.get(mode, mode),
            log_dir=folder,
            id=self._id,
            resume="allow",
        )

    @property
    def id(self) -> str:
        """SwanLab's run id."""
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Hand the numbers to SwanLab, which writes them by itself."""
        self._swanlab.log(dict(metrics), step=step)

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Log the table as a text."""
        self._swanlab.log({"val/generations": self._swanlab.Text(markdown_table(rows))}, step=step)

    def flush(self) -> None:
        """SwanLab has no such call: what it holds is written at the end."""

    def close(self, exit_code: int | None) -> None:
        """End the attempt."""
        if exit_code in (EXIT_OK, EXIT_REQUEUE):
            self._swanlab.finish()
        elif exit_code is None:
            self._swanlab.finish("aborted")
        else:
            self._swanlab.finish("crashed", error=f"exit code {exit_code}")
