"""One run as a page for a terminal, and the pages of runs that no ledger knows."""

from __future__ import annotations

import io
import json
import math
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from jobs.__main__ import main
from jobs.run_state import RunState
from jobs.view.run_page import RunRecord, duration, eta_s, page, read_record, sparkline
from tests.tracking.terminal import drain
from trainer.base.metrics_file import MetricsFile


def test_a_curve_has_a_block_for_each_share_of_the_values() -> None:
    assert sparkline([0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0], 20) == "▁▂▃▄▅▆▇█"
    assert sparkline([0.0, 0.0, 7.0, 7.0], 2) == "▁█"
    assert sparkline([3.0, 3.0], 5) == "▁▁"
    assert sparkline([1.0, math.nan, 2.0], 3) == "▁!█"
    assert sparkline([math.inf], 3) == "!"
    assert len(sparkline([float(i) for i in range(1000)], 37)) == 37


def test_time_left_comes_from_the_last_steps() -> None:
    steps = {step: {"time": 100.0 + 2.0 * step} for step in range(1, 11)}
    assert eta_s(steps, 20) == 20.0
    assert eta_s({1: {"time": 5.0}}, 20) is None and eta_s({}, 3) is None
    assert [duration(s) for s in (3, 65, 7300)] == ["3s", "1m05s", "2h01m"]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    folder = tmp_path / "a-run"
    (folder / "generations").mkdir(parents=True)
    (folder / "checkpoints/step_2").mkdir(parents=True)
    (folder / "checkpoints/step_2/manifest.json").write_text("{}")
    (folder / "config.yaml").write_text("trainer: {total_training_steps: 4}\n")
    (folder / "generations/step_3.jsonl").write_text(
        json.dumps({"prompt": "1+1=[red]", "response": "two\nlines", "score": 0.5}) + "\n"
    )
    file = MetricsFile(folder / "metrics.jsonl", 0)
    for step in (1, 2, 3):
        file.append(
            {
                "step": step,
                "time": 1000.0 + 10 * step,
                "critic/score/mean": step / 4,
                "perf/tokens_per_second": 1500.0,
                "perf/cpu_memory_used_gb": 1.5,
                "timing/step": 10.0,
                "timing/gen": 7.5,
                "timing/gen/mean": 7.5,
                "timing/update_actor": 2.0,
            }
        )
    file.close()
    return folder


def text_of(record: RunRecord, width: int, state: RunState | None = None) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(page("a-run", state, record, width, now=1045.0))
    return console.export_text()


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_page_shows_progress_curves_phases_and_samples(run: Path, width: int) -> None:
    state = RunState(state="RUNNING", attempt=2, reason="")
    text = text_of(read_record(run), width, state)
    assert "a-run  RUNNING  attempt 2" in text
    assert "step 3/4 · about 10s left · 15s ago · saved at step 2" in text
    (reward,) = [line for line in text.splitlines() if line.startswith("reward")]
    assert "0.75" in reward and "▁" in reward and "0.25 … 0.75" in reward
    gen, update = (
        next(line for line in text.splitlines() if line.strip().startswith(name))
        for name in ("gen", "update_actor")
    )
    assert "7.50 s" in gen and gen.count("█") > 3 * update.count("█") > 0
    assert "1+1=[red]" in text and "0.5: two lines" in text and "host 1.50 GiB" in text
    assert all(len(line) <= width for line in text.splitlines())


def test_a_run_before_its_first_step(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text(": : :")
    assert "no step is done yet" in text_of(read_record(tmp_path), 80)


def test_one_frame_of_a_folder_that_no_ledger_knows(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(run.parent)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["watch", "a-run"]) == 0
    assert "step 3/4" in capsys.readouterr().out
    assert main(["watch", "a-ran"]) == 2
    assert "ledger" in capsys.readouterr().err


def test_on_a_terminal_it_draws_until_ctrl_c(run: Path) -> None:
    code = f"import sys; from jobs.__main__ import main; sys.exit(main(['watch', {str(run)!r}]))"
    terminal, child = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=child,
        stdout=child,
        stderr=child,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "80", "LINES": "40"},
        start_new_session=True,
    )
    os.close(child)
    shown = b""
    while b"step 3/4" not in shown:
        shown += os.read(terminal, 65536)
    process.send_signal(2)
    shown += drain(terminal).encode()
    assert process.wait(60) == 0 and b"Traceback" not in shown
    assert b"\x1b[?1049l" in shown  # the screen that was there is back
