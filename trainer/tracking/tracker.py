"""The metrics of a run: to ``metrics.jsonl``, to W&B and to the screen."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.environment import available_cores
from trainer.base.errors import UserError, nearest
from trainer.base.metrics_file import METRICS_FILE, MetricsFile, ReplacedSteps, to_plain
from trainer.base.rank_info import rank_from_environment
from trainer.base.run_folder import DISPLAY_NAME, log_folder, read_json
from trainer.config.schema import Config
from trainer.config.schema.trainer import Watermarks
from trainer.config.user_files import recorded_digests
from trainer.tracking.console import Display, PlainDisplay, make_display
from trainer.tracking.health import Health, workers_hint
from trainer.tracking.learning_hints import LearningSettings
from trainer.tracking.loggers import LOGGERS as FOLLOWERS
from trainer.tracking.loggers import check_loggers as check_followers
from trainer.tracking.loggers.followers import Followers
from trainer.tracking.optional_output import optional_output
from trainer.tracking.wandb_rows import RunRecord
from trainer.tracking.wandb_run import MODES, WandbRun, load_or_create_identity

LOGGERS = ("console", "wandb", *FOLLOWERS)
"""Where metrics go besides ``metrics.jsonl``, which is always written."""


STEPS_LOG = "steps.log"
"""In the logs of an attempt: a long line for each step, where the screen is a terminal."""


class Tracker:
    """Records and shows metrics on rank 0. On the other ranks it only writes messages, to their
    logs.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        rank: int,
        loggers: str | Sequence[str],
        project: str,
        name: str,
        total_steps: int,
        watermarks: Watermarks,
        steps_done: int = 0,
        attempt: int = 1,
        trains: bool = True,
        mode: str = "auto",
        num_workers: int | None = None,
        learning: LearningSettings | None = None,
    ) -> None:
        """``steps_done``: the restored step. ``trains``: the lines of later steps are set aside,
        since ``attempt`` takes these steps again; False for a run that takes none.

        ``mode``: auto, online, offline or disabled (W&B). Raises :class:`UserError` for an unknown
        logger or mode and for a run folder that can't be written.
        """
        loggers = [loggers] if isinstance(loggers, str) else list(loggers)
        check_loggers(loggers, mode)
        self.run_dir = run_dir
        self._active = rank == 0
        self._display: Display | None = None
        self._wandb: WandbRun | None = None
        self.replaced: ReplacedSteps | None = None
        """Steps of earlier attempts whose lines were set aside; known on rank 0."""
        if not self._active:
            self._display = PlainDisplay(total_steps) if "console" in loggers else None
            return
        self._file = _open_record(run_dir, steps_done if trains else None, attempt)
        self.replaced = self._file.replaced
        if "console" in loggers:
            log = log_folder(run_dir, attempt) / STEPS_LOG
            self._display = make_display(total_steps, steps_done, log)
        self._health = Health(watermarks, num_workers=num_workers, learning=learning)
        if num_workers:
            ranks = rank_from_environment().local_world_size
            self._show_hints([workers_hint(num_workers, ranks, available_cores(), watermarks)])
        if "wandb" in loggers:
            identity = load_or_create_identity(run_dir, project, name)
            record = RunRecord(run_dir, self._file.start)
            self._wandb = WandbRun(run_dir, config, identity=identity, mode=mode, record=record)
        names = [name for name in loggers if name in FOLLOWERS]
        self._followers = Followers(run_dir, names, self.message)

    @classmethod
    def from_config(
        cls,
        config: Config,
        run_dir: Path,
        *,
        rank: int,
        total_steps: int,
        steps_done: int,
        attempt: int,
    ) -> Tracker:
        """The tracker of a run with ``trainer.logger`` and the other keys that name its outputs.

        Raises :class:`UserError` for an unknown logger and for a run folder that can't be written.
        """
        section = config.trainer
        return cls(
            run_dir,
            config.model_dump() | {"user_files": recorded_digests(run_dir)},
            rank=rank,
            loggers=section.logger,
            project=section.project_name,
            name=read_json(run_dir / "job.json").get(DISPLAY_NAME) or section.experiment_name,
            total_steps=total_steps,
            watermarks=section.watermarks,
            steps_done=steps_done,
            attempt=attempt,
            trains=not section.val_only,
            num_workers=config.data.num_workers,
            learning=LearningSettings.from_config(config),
        )

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record and show ``metrics`` of training step ``step``; a step may be logged several
        times.

        Values are numbers, texts or 0-d tensors. Call it before the checkpoint of that step is
        committed.
        """
        if not self._active:
            return
        plain = self.record(step, metrics)
        if self._display is not None:
            self._display.update(step, plain)
        self._show_hints(self._health.check(plain))

    def record(self, step: int, metrics: Mapping[str, Any]) -> dict[str, Any]:
        """Record ``metrics`` in the file and in W&B without showing them; return them as they were
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
        """Write a validation's texts to ``<run>/generations/step_N.jsonl`` and to W&B."""
        if not self._active or not rows:
            return
        path = self.run_dir / "generations" / f"step_{step}.jsonl"
        lines = (json.dumps(dict(row), ensure_ascii=False, default=to_plain) + "\n" for row in rows)
        with optional_output(str(path), self.message):
            path.parent.mkdir(mode=0o700, exist_ok=True)
            atomic.write_text(path, "".join(lines), durable=False)
        if self._wandb is not None:
            self._wandb.log_table(step, [dict(row) for row in rows])

    def alert(self, title: str, text: str) -> None:
        """Send an alert by W&B, where it is on."""
        if self._active and self._wandb is not None:
            self._wandb.alert(title, text)

    def message(self, text: str) -> None:
        """Write ``text`` (a banner, a hint, a path) to the screen on rank 0, and to the rank's log
        on the others.
        """
        if self._display is not None:
            self._display.message(text)

    def sync(self) -> None:
        """Make the record durable; call it before a checkpoint is committed."""
        if self._active:
            self._file.sync()

    @property
    def wandb_folder(self) -> Path | None:
        """This attempt's W&B folder; None when W&B is off."""
        return None if self._wandb is None else self._wandb.folder

    @property
    def wandb_url(self) -> str | None:
        """The run's page; None unless W&B is online."""
        return None if self._wandb is None else self._wandb.url

    def close(self, exit_code: int) -> None:
        """Close all outputs. May be called twice: after a failure and on the way out."""
        if not self._active:
            return
        self._active = False
        if self._display is not None:
            self._display.close()
        self._file.close()
        self._followers.close(exit_code)
        if self._wandb is not None:
            self._wandb.finish(exit_code)

    def _show_hints(self, hints: Sequence[str | None]) -> None:
        for hint in hints:
            if hint is not None:
                self.message(f"[HINT] {hint}")


def check_loggers(loggers: Sequence[str], mode: str) -> None:
    """Raise :class:`UserError` for a name that isn't a logger or a mode."""
    for name in loggers:
        if name not in LOGGERS:
            raise UserError(
                f"trainer.logger={list(loggers)}: {name!r} is not a logger "
                f"here{nearest(name, LOGGERS)}. Choose from {', '.join(LOGGERS)}."
            )
    check_followers([name for name in loggers if name in FOLLOWERS], os.environ)
    if mode not in MODES:
        raise UserError(
            f"W&B mode {mode!r} is unknown{nearest(mode, MODES)}. Choose from {', '.join(MODES)}."
        )


def _open_record(run_dir: Path, steps_done: int | None, attempt: int) -> MetricsFile:
    path = run_dir / METRICS_FILE
    try:
        return MetricsFile(path, steps_done, attempt=attempt)
    except OSError as error:
        raise UserError(
            f"{path} can't be written ({error.strerror}): set trainer.default_local_dir to a "
            "folder that is yours and has space."
        ) from error
