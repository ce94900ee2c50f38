"""The lines of a run's record to one logger, each once, however often the logger fails."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import first_line
from trainer.base.json_files import open_regular, read_lines
from trainer.base.metrics_file import METRICS_FILE, decode
from trainer.tracking.loggers.logger import LoggedRun, Logger, numbers_of
from trainer.tracking.loggers.sent_lines import SentLines
from trainer.tracking.wandb_rows import METRICS, TABLE

FIRST_WAIT_S = 1.0
LONGEST_WAIT_S = 60.0
"""Between two tries of a logger that fails; each wait is twice the one before."""


class RecordTail:
    """The whole lines of ``metrics.jsonl`` as they come, and the tables of their steps."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._offset = 0

    def lines(self) -> Iterator[dict[str, Any]]:
        """The lines since the last call, as far as they were taken from the iterator."""
        try:
            file = open_regular(self._run_dir / METRICS_FILE)
        except OSError:
            return  # not there yet
        with file:
            file.seek(self._offset)
            while True:
                line = file.readline()
                if not line.endswith(b"\n"):
                    return
                self._offset += len(line)
                record = decode(line)
                if record is not None:
                    yield record

    def table(self, step: int) -> list[dict[str, Any]]:
        """The texts of a step's validation; empty when it has none."""
        return read_lines(self._run_dir / "generations" / f"step_{step}.jsonl")


class Delivery:
    """Sends to one logger what it lacks. A logger that fails is made anew."""

    def __init__(
        self,
        run: LoggedRun,
        name: str,
        *,
        make: Callable[[str, LoggedRun], Logger],
        tell: Callable[[str], None],
    ) -> None:
        """Raises BlockingIOError while another process sends this run to the logger."""
        self._run = run
        self._name = name
        self._make = make
        self._tell = tell
        self._sent = SentLines(run.folder, name)
        self._tail = RecordTail(run.folder)
        self._index: Counter[tuple[int, str]] = Counter()
        self._pending: dict[str, Any] | None = None
        """The line that the logger didn't take."""
        self._logger: Logger | None = None
        self._failures = 0
        self.lines = 0
        """That were sent."""

    @property
    def wait_s(self) -> float:
        """How long to wait before the next try; 0 when the last one succeeded."""
        if self._failures == 0:
            return 0.0
        return float(min(FIRST_WAIT_S * 2 ** (self._failures - 1), LONGEST_WAIT_S))

    def deliver(self) -> bool:
        """Send the lines that are new. False when the logger failed: call it again later."""
        try:
            self._send_new_lines()
        except Exception as error:  # whatever a logger's package raises
            self._failed(error)
            return False
        if self._failures:
            self._tell(f"{self._name} takes metrics again: it has what it missed.")
        self._failures = 0
        return True

    def close(self, exit_code: int | None) -> bool:
        """End the attempt for the logger. False when that failed."""
        try:
            if self._logger is not None:
                self._logger.close(exit_code)
        except Exception as error:
            self._tell(f"[WARNING] {self._name} didn't take the run's end: {first_line(error)}")
            return False
        finally:
            self._sent.close()
        return True

    def _send_new_lines(self) -> None:
        if self._pending is not None:
            self._send(self._pending)
            self._pending = None
        for record in self._tail.lines():
            self._pending = record
            self._send(record)
            self._pending = None

    def _send(self, record: Mapping[str, Any]) -> None:
        """Send one line of the record, and with the first one of a step its table."""
        step = int(record["step"])
        index = self._index[step, METRICS]
        time_s = float(record.get("time") or 0.0)
        if not self._sent.has(step, METRICS, index):
            logger = self._connected()
            logger.log(step, numbers_of(_metrics_of(record)), time_s)
            logger.flush()
            self._sent.add(step, METRICS)
            self.lines += 1
        self._index[step, METRICS] += 1
        if index == 0 and not self._sent.has(step, TABLE, 0):
            self._send_table(step, time_s)

    def _send_table(self, step: int, time_s: float) -> None:
        rows = self._tail.table(step)
        if not rows:
            return
        try:
            logger = self._connected()
            logger.log_table(step, rows, time_s)
            logger.flush()
        except Exception as error:  # the metrics go on
            self._tell(f"[WARNING] {self._name} took no table of step {step}: {first_line(error)}")
            return
        self._sent.add(step, TABLE)

    def _connected(self) -> Logger:
        if self._logger is None:
            self._logger = self._make(self._name, self._known_run())
            self._sent.set_id(self._logger.id)
        return self._logger

    def _known_run(self) -> LoggedRun:
        run = self._run
        return LoggedRun(run.folder, run.project, run.name, run.group, run.config, self._sent.id)

    def _failed(self, error: Exception) -> None:
        self._failures += 1
        self._logger = None
        if self._failures == 1:
            self._tell(
                f"[WARNING] {self._name} takes no metrics ({type(error).__name__}: "
                f"{first_line(error)}). The run goes on; what it misses is sent later."
            )


def _metrics_of(record: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in ("step", "time")}
