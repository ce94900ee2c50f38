"""Loggers besides the screen and W&B: TensorBoard, MLflow, SwanLab, Trackio.

``metrics.jsonl`` is the record of a run, and a logger a view of it. Each has a process of its own
(``follow``), which reads the record as it grows and hands each line to the logger once
(``delivery``); the journal ``<run>/loggers/NAME.jsonl`` says which lines it has. So a logger that
is down, slow or broken doesn't slow the training, and what it missed is sent later: by the same
process, by that of the next attempt, or by ``python -m jobs sync``. ``followers`` starts and ends
the processes.

A new logger: a file of this folder with ``check`` and a class as in ``logger``, a line in
``LOGGERS``, and its name in ``trainer/config/schema/trainer.py``.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from trainer.base.errors import UserError
from trainer.tracking.loggers.logger import LoggedRun, Logger

__all__ = ["LOGGERS", "LoggedRun", "Logger", "check_loggers", "make_logger"]


@dataclass(frozen=True)
class Kind:
    """Where a logger is found."""

    class_name: str
    """In the module of the logger's name."""
    import_name: str
    """What its package is imported as."""
    package: str
    """What pip installs."""


LOGGERS: Mapping[str, Kind] = {
    "tensorboard": Kind("TensorBoardLogger", "tensorboard", "tensorboard"),
    "mlflow": Kind("MlflowLogger", "mlflow", "mlflow"),
    "swanlab": Kind("SwanlabLogger", "swanlab", "swanlab"),
    "trackio": Kind("TrackioLogger", "trackio", "trackio"),
}


def check_loggers(names: Iterable[str], env: Mapping[str, str]) -> None:
    """Raise :class:`UserError` for a logger whose package or address is missing."""
    for name in names:
        kind = LOGGERS[name]
        if importlib.util.find_spec(kind.import_name) is None:
            raise UserError(
                f"trainer.logger has {name}, but its package isn't installed. Type "
                f"pip install {kind.package}, or leave {name} out of trainer.logger."
            )
        problem = importlib.import_module(f"{__name__}.{name}").check(env)
        if problem is not None:
            raise UserError(
                f"trainer.logger has {name}: {problem}, or leave {name} out of trainer.logger."
            )


def make_logger(name: str, run: LoggedRun) -> Logger:
    """The logger of that name, connected. Raises whatever its package raises."""
    module = importlib.import_module(f"{__name__}.{name}")
    logger: Logger = getattr(module, LOGGERS[name].class_name)(run)
    return logger
