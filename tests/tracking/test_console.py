"""The run on a terminal, in a file, and for a terminal without colours."""

from __future__ import annotations

import io
import os
import pty
import subprocess
import sys
from pathlib import Path

from tests.tracking.terminal import drain
from trainer.tracking.console import Eta, PlainDisplay
from trainer.tracking.console_text import (
    fitted_line,
    format_duration,
    format_number,
    plain_line,
    progress_text,
)

METRICS = {
    "actor/loss": 0.123456,
    "critic/score/mean": 0.5,
    "perf/tokens_per_second": 12345.6,
    "perf/cpu_memory_used_gb": 3.25,
    "timing/gen": 1.0,
    "timing/gen/mean": 1.0,
    "timing/gen/std": 0.0,
}


def test_a_plain_line_reads_like_the_users_logs() -> None:
    assert plain_line(
        3, 10, METRICS | {"batch/plan_ms": 2.0, "cost/overhead_ms": 1.0, "custom": 4}, 185.0
    ) == (
        "step:3/10 - critic/score/mean:0.5 - actor/loss:0.1235 - perf/tokens_per_second:1.235e+04 "
        "- "
        "perf/cpu_memory_used_gb:3.25 - timing/gen:1 - custom:4 - eta:3m05s"
    )


def test_the_headline_is_the_reward_when_there_is_one() -> None:
    assert progress_text(METRICS, 3725) == "reward 0.5 · 12,346 tok/s · 3.2 GB · 1h02m left"
    assert progress_text({"actor/loss": 0.25}, None) == "loss 0.25"


def test_numbers_and_durations_are_short() -> None:
    assert [format_number(v) for v in (1.0, 1e20, float("nan"), 3, "x", 1234567.0)] == [
        "1",
        "1e+20",
        "nan",
        "3",
        "x",
        "1234567",
    ]
    assert [format_duration(s) for s in (42, 185, 7620, 273600)] == [
        "42s",
        "3m05s",
        "2h07m",
        "3d04h",
    ]


def test_time_left_forgets_the_slow_first_step() -> None:
    times = iter([0.0, 100.0, 101.0, 102.0, 103.0])
    eta = Eta(10, clock=lambda: next(times), window=2)
    assert eta.update(1) is None
    assert [eta.update(s) for s in (2, 3, 4, 5)][-1] == 5.0


def test_a_closed_pipe_does_not_end_a_run() -> None:
    stream = io.StringIO()
    stream.close()
    PlainDisplay(10, stream).update(1, METRICS)


SHOW_STEPS = """
import os
from pathlib import Path
from trainer.tracking.console import make_display
display = make_display(2, 0, Path(os.environ["STEPS_LOG"]) if "STEPS_LOG" in os.environ else None)
display.message("[HINT] said above")
for step in (1, 2):
    display.update(step, {"critic/score/mean": 0.5 * step, "perf/tokens_per_second": 1000.0})
display.close()
"""


def show(env: dict[str, str]) -> str:
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [sys.executable, "-c", SHOW_STEPS],
        stdout=follower,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "COLUMNS": "120"} | env,
    )
    os.close(follower)
    text = drain(leader)
    assert child.wait(200) == 0
    return text


def test_a_terminal_gets_one_live_line() -> None:
    text = show({"TERM": "xterm-256color"})
    assert "\x1b[" in text and "reward 1" in text and "1,000 tok/s" in text and "2/2" in text
    assert text.count("[HINT] said above") == 1


def test_a_steps_line_fits_the_terminal(tmp_path: Path) -> None:
    log = tmp_path / "steps.log"
    text = show({"TERM": "xterm-256color", "COLUMNS": "40", "STEPS_LOG": str(log)})
    assert "step 1/2 · reward 0.5 · tok/s 1000" in text and "step 2/2 · reward 1" in text
    assert [line.split(" - ")[1] for line in log.read_text().splitlines()] == [
        "critic/score/mean:0.5",
        "critic/score/mean:1",
    ]
    assert log.stat().st_mode & 0o77 == 0
    for width in (20, 40, 80, 200):
        assert len(fitted_line(3, 10, METRICS, width)) <= width
    assert fitted_line(3, 10, METRICS, 34) == "step 3/10 · reward 0.5"
    assert fitted_line(3, 10, METRICS, 80) == "step 3/10 · reward 0.5 · tok/s 1.235e+04"


def test_no_color_means_no_colour() -> None:
    text = show({"TERM": "xterm-256color", "NO_COLOR": "1"})
    assert "\x1b[3" not in text and "\x1b[9" not in text and "2/2" in text


def test_a_dumb_terminal_and_a_file_get_plain_lines() -> None:
    expected = [
        "[HINT] said above",
        "step:1/2 - critic/score/mean:0.5 - perf/tokens_per_second:1000",
    ]
    assert show({"TERM": "dumb"}).replace("\r", "").splitlines()[:2] == expected
    done = subprocess.run(
        [sys.executable, "-c", SHOW_STEPS], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.splitlines()[:2] == expected
