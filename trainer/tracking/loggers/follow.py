"""Send a run's metrics to a logger: ``python -m trainer.tracking.loggers.follow RUN NAME``.

Sends what the logger lacks of ``metrics.jsonl`` and ends, which is what ``python -m jobs sync``
calls. With ``--live`` it goes on while the run writes, until the pipe at its standard input ends.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from trainer.base import caches
from trainer.base.command import run_command
from trainer.base.errors import EXIT_OK, UserError
from trainer.base.masking import mask_values
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.run_folder import DISPLAY_NAME, LOGGERS_FOLDER, read_json
from trainer.config import load_frozen
from trainer.tracking.loggers import LOGGERS, LoggedRun, check_loggers, make_logger
from trainer.tracking.loggers.delivery import Delivery

POLL_S = 0.5
"""How often the record is looked at for new lines."""
NICE = 10
"""The process gives way to the training where cores are few."""
LEFT_ALONE_S = 60.0
"""How long a process whose trainer was killed may try to send the rest."""
STOP_SIGNALS = (
    *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP),
    *(signal.SIGUSR1, signal.SIGUSR2),
)
"""Slurm and terminals send them to every process of a run."""
TRIES = 3
"""Of a logger that fails, without ``--live``."""


def logged_run(run_dir: Path) -> LoggedRun:
    """The run of a folder. Raises :class:`UserError` when it holds none."""
    for path in (run_dir / METRICS_FILE, run_dir / "config.yaml"):
        if not path.is_file():
            raise UserError(
                f"{path} doesn't exist: give the folder of a run (it holds config.yaml and "
                "metrics.jsonl)."
            )
    config = load_frozen(run_dir, complete=False).model_dump()
    section = config.get("trainer") or {}
    name = read_json(run_dir / "job.json").get(DISPLAY_NAME) or section.get("experiment_name")
    return LoggedRun(
        folder=run_dir,
        project=str(section.get("project_name") or "plimsoll"),
        name=str(name or run_dir.name),
        group=os.environ.get("WANDB_RUN_GROUP"),
        config=mask_values(config),
        id=None,
    )


class Trainer:
    """The process that writes the record: whether it has ended, and how.

    It writes its exit code into this one's standard input. Processes that it forked may hold the
    pipe open after it was killed, so its end alone would tell too little.
    """

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.exit_code: int | None = None
        """None when it was killed."""
        threading.Thread(target=self._read, daemon=True).start()
        threading.Thread(target=self._watch, args=(os.getppid(),), daemon=True).start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError):  # at its end the pipe gives an empty line
            self.exit_code = int(sys.stdin.readline())
        self.ended.set()

    def _watch(self, parent: int) -> None:
        while not self.ended.wait(POLL_S) and os.getppid() == parent:
            pass
        self.ended.set()
        if self.exit_code is None:
            threading.Event().wait(LEFT_ALONE_S)
            os._exit(1)


def follow(delivery: Delivery, trainer: Trainer) -> bool:
    """Deliver until the trainer has ended and everything is sent."""
    while True:
        last = trainer.ended.is_set()
        if delivery.deliver() and last:
            return delivery.close(trainer.exit_code)
        if last:
            threading.Event().wait(min(delivery.wait_s, LEFT_ALONE_S / 10))
        else:
            trainer.ended.wait(max(POLL_S, delivery.wait_s))


def deliver_once(delivery: Delivery) -> bool:
    """Deliver what the record has; try a few times."""
    for _ in range(TRIES):
        if delivery.deliver():
            return delivery.close(EXIT_OK)
        threading.Event().wait(delivery.wait_s)
    delivery.close(EXIT_OK)
    return False


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command(lambda: _run(arguments))


def _run(arguments: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m trainer.tracking.loggers.follow", description=__doc__
    )
    parser.add_argument("run", type=Path, help="the run's folder")
    parser.add_argument("name", choices=sorted(LOGGERS), metavar="NAME", help="the logger")
    parser.add_argument("--live", action="store_true", help="go on while the run writes")
    options = parser.parse_args(arguments)
    caches.prepare(options.run)
    check_loggers([options.name], os.environ)
    run = logged_run(options.run)
    tell = _screen()
    if not options.live:
        delivery = _open(run, options.name, tell, 0.0)
        _keep_chatter_out(options.run, options.name)
        done = deliver_once(delivery)
        if done:
            tell(f"{delivery.lines} lines sent to {options.name}")
        return EXIT_OK if done else 1
    os.nice(NICE)
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)  # it ends with the trainer
    trainer = Trainer()
    delivery = _open(run, options.name, tell, 2 * LEFT_ALONE_S)
    _keep_chatter_out(options.run, options.name)
    return EXIT_OK if follow(delivery, trainer) else 1


def _open(run: LoggedRun, name: str, tell: Callable[[str], None], wait_s: float) -> Delivery:
    """The delivery, once the process of an earlier attempt has ended."""
    deadline = time.monotonic() + wait_s
    while True:
        try:
            return Delivery(run, name, make=make_logger, tell=tell)
        except BlockingIOError as error:
            if time.monotonic() >= deadline:
                raise UserError(f"{error}; wait until it has ended.") from error
            time.sleep(POLL_S)


def _screen() -> Callable[[str], None]:
    """A function that writes to what is now the standard error."""
    screen = os.fdopen(os.dup(2), "w", encoding="utf-8", errors="backslashreplace")

    def tell(text: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            screen.write(text + "\n")
            screen.flush()

    return tell


def _keep_chatter_out(run_dir: Path, name: str) -> None:
    """Turn what the logger's package prints into ``<run>/loggers/NAME.log``."""
    log = os.open(
        run_dir / LOGGERS_FOLDER / f"{name}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600
    )
    for stream in (1, 2):
        os.dup2(log, stream)


if __name__ == "__main__":
    sys.exit(main())
