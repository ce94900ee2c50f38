"""MLflow, at the server or database that MLFLOW_TRACKING_URI names."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.errors import EXIT_OK, EXIT_REQUEUE
from trainer.tracking.loggers.logger import LoggedRun, flat_config, markdown_table

URI = "MLFLOW_TRACKING_URI"
EXAMPLES = "http://host:5000, sqlite:////path/mlflow.db"
MOST_METRICS = 1000
"""Of one request, MLflow's limit."""
MOST_PARAMETERS = 100
"""Of one request, MLflow's limit."""
MOST_CHARACTERS = 500
"""Of a parameter's value, in servers of all versions."""
BOUNDS = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "30", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "0"}
"""By default the client tries again for minutes; here a failed request is made again later."""


def check(env: Mapping[str, str]) -> str | None:
    """What keeps the logger from starting."""
    uri = env.get(URI)
    if not uri:
        return f"set {URI} to your server or database ({EXAMPLES})"
    if uri.startswith("file:") or ("://" not in uri and uri not in ("databricks", "uc")):
        return (
            f"{URI}={uri} is a store of files, which can't hold val/reward beside "
            f"val/reward/std; set it to a server or database ({EXAMPLES})"
        )
    return None


class MlflowLogger:
    """See :class:`trainer.tracking.loggers.logger.Logger`."""

    def __init__(self, run: LoggedRun) -> None:
        """Create the run in the experiment of the project's name, or set it to running again."""
        for name, value in BOUNDS.items():
            os.environ.setdefault(name, value)
        from mlflow import MlflowClient

        self._client = MlflowClient(os.environ[URI])
        if run.id is not None:
            self._id = run.id
            self._client.update_run(self._id, status="RUNNING")
            return
        created = self._client.create_run(self._experiment(run), run_name=run.name, tags=_tags(run))
        self._id = str(created.info.run_id)
        self._log_parameters(run.config)

    @property
    def id(self) -> str:
        """MLflow's run id."""
        return self._id

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Send the numbers. MLflow keeps one of equal values of a step and time."""
        from mlflow.entities import Metric

        time_ms = int(time_s * 1000)
        values = [
            Metric(metric_name(name), value, time_ms, step) for name, value in metrics.items()
        ]
        for start in range(0, len(values), MOST_METRICS):
            self._client.log_batch(self._id, metrics=values[start : start + MOST_METRICS])

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Store the table as a file of the run."""
        self._client.log_text(self._id, markdown_table(rows), f"generations/step_{step}.md")

    def flush(self) -> None:
        """Requests have been answered already."""

    def close(self, exit_code: int | None) -> None:
        """Set the run's status."""
        status = {EXIT_OK: "FINISHED", EXIT_REQUEUE: "SCHEDULED", None: "KILLED"}
        self._client.set_terminated(self._id, status=status.get(exit_code, "FAILED"))

    def _experiment(self, run: LoggedRun) -> str:
        name = run.project
        found = self._client.get_experiment_by_name(name)
        if found is not None:
            return str(found.experiment_id)
        try:
            return str(self._client.create_experiment(name, artifact_folder(run.folder)))
        except Exception:
            found = self._client.get_experiment_by_name(name)  # another run created it
            if found is None:
                raise
            return str(found.experiment_id)

    def _log_parameters(self, config: Mapping[str, Any]) -> None:
        from mlflow.entities import Param

        values = [
            Param(metric_name(key), str(value)[:MOST_CHARACTERS])
            for key, value in flat_config(config).items()
        ]
        for start in range(0, len(values), MOST_PARAMETERS):
            self._client.log_batch(self._id, params=values[start : start + MOST_PARAMETERS])


def artifact_folder(run: Path) -> str | None:
    """Where the files of an experiment's runs go: beside an SQLite database, in the run folder for
    another one; None where a server says. MLflow itself would take the working directory.
    """
    uri = os.environ[URI]
    if uri.startswith("sqlite:///"):
        database = Path(uri.removeprefix("sqlite:///")).absolute()
        return str(database.parent / "mlartifacts")
    is_server = uri.startswith(("http://", "https://", "databricks", "uc"))
    return None if is_server else str(run.absolute() / "mlartifacts")


def metric_name(name: str) -> str:
    """``name`` in the letters that MLflow takes; ``@`` becomes ``_at_``, as in verl."""
    return re.sub(r"[^\w.\- /:]", "_", name.replace("@", "_at_"))


def _tags(run: LoggedRun) -> dict[str, str]:
    tags = {"run_folder": str(run.folder)}
    if run.group is not None:
        tags["sweep"] = run.group
    return tags
