"""One object that the training loop tells its metrics to."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base.environment import available_cores, rank_from_environment
from trainer.base.errors import UserError, nearest
from trainer.base.metrics_file import METRICS_FILE, MetricsFile, to_plain
from trainer.tracking.console import Display, PlainDisplay, make_display
from trainer.tracking.health import Health, Watermarks, workers_hint
from trainer.tracking.wandb_run import MODES, WandbRun, persistent_identity

LOGGERS = ("console", "wandb", "jsonl")
"""``jsonl`` is always on and may be named."""


class Tracker:
    """Metrics of a run: the record, W&B and the screen. Every rank makes one; only rank 0's keeps
    metrics, the others' only pass on what they are told to say."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        rank: int,
        loggers: str | Sequence[str],
        project: str,
        name: str,
        group: str | None,
        total_steps: int,
        steps_done: int = 0,
        going_on: bool = True,
        mode: str = "auto",
        watermarks: Watermarks | None = None,
        num_workers: int | None = None,
    ) -> None:
        """``steps_done``: the restored step; what the record holds beyond it is cut, since it will
        be done again, unless the run is ``going_on`` no further.

        ``mode``: auto, online, offline or disabled (W&B). Raises :class:`UserError` for an unknown
        logger or mode and for a run folder that can't be written.
        """
        loggers = [loggers] if isinstance(loggers, str) else list(loggers)
        check_loggers(loggers, mode)
        self._active = rank == 0
        self._display: Display | None = None
        if not self._active:
            self._display = PlainDisplay(total_steps) if "console" in loggers else None
            return
        self.run_dir = run_dir
        try:
            self._file = MetricsFile(run_dir / METRICS_FILE, steps_done if going_on else None)
        except OSError as error:
            raise UserError(
                f"{run_dir / METRICS_FILE} can't be written ({error.strerror}): set "
                "trainer.default_local_dir to a "
                "folder that is yours and has space."
            ) from error
        if "console" in loggers:
            self._display = make_display(total_steps, steps_done)
        marks = watermarks or Watermarks()
        self._health = Health(marks, num_workers=num_workers)
        ranks, cores = rank_from_environment().local_world_size, available_cores()
        if num_workers and (hint := workers_hint(num_workers, ranks, cores, marks)) is not None:
            self.message(f"[HINT] {hint}")
        self._wandb = (
            WandbRun(
                run_dir,
                config,
                identity=persistent_identity(run_dir, project, name, group),
                mode=mode,
            )
            if "wandb" in loggers
            else None
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record ``metrics`` of optimizer step or iteration ``step``; a step may be logged several
        times.

        Values are numbers, texts or 0-d tensors. Call it before the checkpoint of that step is
        committed.
        """
        if not self._active:
            return
        plain = self.record(step, metrics)
        if self._display is not None:
            self._display.update(step, plain)
        for hint in self._health.check(plain):
            self.message(f"[HINT] {hint}")

    def record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Keep ``metrics`` in the record and in W&B without showing them; returns them as they were
        written.
        """
        if not self._active:
            return {}
        plain = {key: to_plain(value) for key, value in metrics.items()}
        self._file.append({"step": step, "time": round(time.time(), 3), **plain})
        if self._wandb is not None:
            self._wandb.log(step, plain)
        return plain

    def log_generations(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Keep a validation's texts in ``<run>/generations/step_N.jsonl`` and show them in W&B."""
        if not self._active or not rows:
            return
        folder = self.run_dir / "generations"
        folder.mkdir(mode=0o700, exist_ok=True)
        path = folder / f"step_{step}.jsonl"
        with open(
            os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w", encoding="utf-8"
        ) as file:
            file.writelines(
                json.dumps(dict(row), ensure_ascii=False, default=to_plain) + "\n" for row in rows
            )
        if self._wandb is not None:
            self._wandb.log_table(step, "val/generations", [dict(row) for row in rows])

    def message(self, text: str) -> None:
        """Say ``text`` (a banner, a hint, where things are); no metric.

        Rank 0 says it on the screen, any other rank on its own output, which the launcher keeps in
        the rank's log.
        """
        if self._display is not None:
            self._display.message(text)

    def sync(self) -> None:
        """Make the record durable; the loop calls it before a checkpoint is committed."""
        if self._active:
            self._file.sync()

    @property
    def wandb_folder(self) -> Path | None:
        """This attempt's W&B folder, None when W&B is off."""
        return self._wandb.folder if self._active and self._wandb is not None else None

    @property
    def wandb_url(self) -> str | None:
        """The run's page when W&B is online."""
        return self._wandb.url if self._active and self._wandb is not None else None

    def close(self, exit_code: int) -> None:
        """Finish all of them. May be called twice (after a failure and on the way out)."""
        if not self._active:
            return
        self._active = False
        if self._display is not None:
            self._display.close()
        self._file.close()
        if self._wandb is not None:
            self._wandb.finish(exit_code)


def check_loggers(loggers: Sequence[str], mode: str) -> None:
    """Raise :class:`UserError` for a name that isn't a logger or a mode."""
    for name in loggers:
        if name not in LOGGERS:
            raise UserError(
                f"trainer.logger={list(loggers)}: {name!r} is not a logger "
                f"here{nearest(name, LOGGERS)}. "
                f"Choose from {', '.join(LOGGERS)}."
            )
    if mode not in MODES:
        raise UserError(
            f"W&B mode {mode!r} is unknown{nearest(mode, MODES)}. Choose from {', '.join(MODES)}."
        )
