"""The run on the screen: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TextIO

from trainer.base.environment import TERMINAL
from trainer.tracking.console_text import fitted_line, plain_line, progress_text


class Display(Protocol):
    """Shows a run's progress."""

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Show the metrics of step ``step``, which is done."""

    def message(self, text: str) -> None:
        """Write a text that stays on the screen."""

    def close(self) -> None:
        """Restore the screen."""


class Eta:
    """Time left, from the mean of the last steps, so that a slow first step doesn't spoil it."""

    def __init__(
        self, total_steps: int, clock: Callable[[], float] = time.monotonic, window: int = 20
    ) -> None:
        self._total_steps = total_steps
        self._clock = clock
        self._marks: deque[tuple[int, float]] = deque(maxlen=window + 1)

    def update(self, step: int) -> float | None:
        """Seconds left after ``step``; None until two steps were seen."""
        self._marks.append((step, self._clock()))
        first_step, start = self._marks[0]
        last_step, end = self._marks[-1]
        if last_step <= first_step:
            return None
        step_s = (end - start) / (last_step - first_step)
        return step_s * max(0, self._total_steps - last_step)


class PlainDisplay:
    """``step:N/total - key:value - ... - eta:3m05s``, one line a step."""

    def __init__(self, total_steps: int, stream: TextIO | None = None) -> None:
        self._total_steps = total_steps
        self._eta = Eta(total_steps)
        self._stream = sys.stdout if stream is None else stream

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Write the step's line."""
        self.message(plain_line(step, self._total_steps, metrics, self._eta.update(step)))

    def message(self, text: str) -> None:
        """Write a line. A closed pipe (``| head``) doesn't end a training run."""
        try:
            self._stream.write(text + "\n")
            self._stream.flush()
        except (OSError, ValueError):
            pass

    def close(self) -> None:
        """Do nothing: there is nothing to restore."""


class RichDisplay:
    """A line for each step that fits the terminal, and below them a live one: step, reward or loss,
    tokens/s, memory, time left.
    """

    def __init__(self, total_steps: int, steps_done: int, log: Path | None = None) -> None:
        """``log``: takes the long lines that :class:`PlainDisplay` shows."""
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        console = Console(
            force_terminal=True if _forced_terminal() else None,
            no_color=True if os.environ.get("NO_COLOR") else None,
        )
        self._total_steps = total_steps
        self._log = log
        self._eta = Eta(total_steps)
        self._progress = Progress(
            TextColumn("step"),
            MofNCompleteColumn(),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[numbers]}"),
            console=console,
        )
        self._task = self._progress.add_task(
            "", total=total_steps, completed=steps_done, numbers=""
        )
        self._progress.start()

    def update(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Print the step's line and redraw the live one."""
        left = self._eta.update(step)
        text = progress_text(metrics, left)
        self._append(plain_line(step, self._total_steps, metrics, left))
        self.message(fitted_line(step, self._total_steps, metrics, self._progress.console.width))
        with contextlib.suppress(OSError):  # the terminal is gone
            self._progress.update(self._task, completed=step, numbers=text)

    def message(self, text: str) -> None:
        """Print above the line."""
        with contextlib.suppress(OSError):
            self._progress.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _append(self, line: str) -> None:
        if self._log is None:
            return
        with contextlib.suppress(OSError):  # a full disk: metrics.jsonl waits and has it
            descriptor = os.open(self._log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
            with open(descriptor, "a", encoding="utf-8") as file:
                file.write(line + "\n")

    def close(self) -> None:
        """Stop redrawing; the last state of the line stays."""
        with contextlib.suppress(OSError):
            self._progress.stop()


def make_display(total_steps: int, steps_done: int, log: Path | None = None) -> Display:
    """A live line on a terminal; plain lines otherwise (files, pipes, TERM=dumb). ``log``: takes
    the long lines where the screen gets short ones.
    """
    on_terminal = sys.stdout.isatty() or _forced_terminal()
    if on_terminal and os.environ.get("TERM") != "dumb":
        return RichDisplay(total_steps, steps_done, log)
    return PlainDisplay(total_steps)


def _forced_terminal() -> bool:
    """Whether the launcher passes this output on to a terminal."""
    return os.environ.get(TERMINAL) == "1"
