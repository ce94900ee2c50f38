"""Every line of the record reaches a logger once, whatever the logger does."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.tracking.loggers.conftest import LINES
from trainer.base.metrics_file import MetricsFile
from trainer.base.run_folder import loggers_of
from trainer.tracking.loggers import LoggedRun
from trainer.tracking.loggers.delivery import LONGEST_WAIT_S, Delivery
from trainer.tracking.loggers.sent_lines import journal_file


class Server:
    """What a logger has taken, over all its connections; it fails as told."""

    def __init__(self) -> None:
        self.metrics: list[tuple[int, dict[str, float], float]] = []
        self.tables: list[tuple[int, list[dict[str, Any]]]] = []
        self.ids: list[str | None] = []
        self.ends: list[int | None] = []
        self.down = False
        self.takes_tables = True


class FakeLogger:
    def __init__(self, server: Server, run: LoggedRun) -> None:
        if server.down:
            raise ConnectionError("no route to host")
        self.server = server
        server.ids.append(run.id)

    @property
    def id(self) -> str:
        return "id-1"

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        if self.server.down:
            raise TimeoutError("slow")
        self.server.metrics.append((step, dict(metrics), time_s))

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        if not self.server.takes_tables:
            raise ValueError("no tables here")
        self.server.tables.append((step, [dict(row) for row in rows]))

    def flush(self) -> None:
        pass

    def close(self, exit_code: int | None) -> None:
        self.server.ends.append(exit_code)


@pytest.fixture
def server() -> Server:
    return Server()


def deliver(run: Path, server: Server, said: list[str] | None = None) -> Delivery:
    about = LoggedRun(run, "plim", "best", None, {}, None)
    messages: list[str] = [] if said is None else said
    return Delivery(
        about, "fake", make=lambda name, run: FakeLogger(server, run), tell=messages.append
    )


def append(run: Path, step: int, **metrics: float) -> None:
    file = MetricsFile(run / "metrics.jsonl", step - 1)
    file.append({"step": step, "time": 1.0, **metrics})
    file.close()


def steps_of(server: Server) -> list[int]:
    return [step for step, _, _ in server.metrics]


def test_each_line_comes_once_in_order_and_numbers_only(run: Path, server: Server) -> None:
    delivery = deliver(run, server)
    assert delivery.deliver() and delivery.deliver() and delivery.close(0)
    assert steps_of(server) == [line["step"] for line in LINES]
    assert [time_s for _, _, time_s in server.metrics] == [line["time"] for line in LINES]
    assert server.metrics[0][1] == {"reward/mean": 0.25, "val/acc/mean@4": 0.5}
    assert math.isnan(server.metrics[1][1]["reward/mean"])
    assert server.tables == [(2, [{"prompt": "1+1=", "answer": "a|b"}])]
    assert server.ends == [0]


def test_a_later_process_sends_only_what_is_new(run: Path, server: Server) -> None:
    first = deliver(run, server)
    assert first.deliver() and first.close(None)
    append(run, 4, a=1.0)
    again = deliver(run, server)
    assert again.deliver() and again.close(0)
    assert steps_of(server) == [1, 2, 2, 3, 4] and again.lines == 1
    assert server.ids == [None, "id-1"] and len(server.tables) == 1
    assert loggers_of(run) == ["fake"] and journal_file(run, "fake").stat().st_mode & 0o77 == 0


def test_steps_that_a_resume_takes_again_are_not_sent_twice(run: Path, server: Server) -> None:
    first = deliver(run, server)
    assert first.deliver() and first.close(None)
    append(run, 2, a=2.0)  # the last checkpoint was that of step 1: lines from 2 on are set aside
    append(run, 3, a=3.0)
    append(run, 4, a=4.0)
    again = deliver(run, server)
    assert again.deliver() and again.close(0)
    assert steps_of(server) == [1, 2, 2, 3, 4]


def test_a_logger_that_is_down_gets_everything_later(run: Path, server: Server) -> None:
    said: list[str] = []
    delivery = deliver(run, server, said)
    server.down = True
    waits = []
    for _ in range(10):
        assert not delivery.deliver()
        waits.append(delivery.wait_s)
    assert waits[:3] == [1.0, 2.0, 4.0] and waits[-1] == LONGEST_WAIT_S
    append(run, 4, a=1.0)
    server.down = False
    assert delivery.deliver() and delivery.wait_s == 0.0
    server.down = True
    append(run, 5, a=1.0)
    assert not delivery.deliver()
    server.down = False
    assert delivery.deliver()
    assert steps_of(server) == [1, 2, 2, 3, 4, 5]
    assert [text.split(" (")[0] for text in said] == [
        "[WARNING] fake takes no metrics",
        "fake takes metrics again: it has what it missed.",
        "[WARNING] fake takes no metrics",
        "fake takes metrics again: it has what it missed.",
    ]


def test_a_line_that_is_not_whole_waits(run: Path, server: Server) -> None:
    delivery = deliver(run, server)
    assert delivery.deliver()
    line = json.dumps({"step": 9, "a": 1.0})
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[:7])
    assert delivery.deliver() and steps_of(server)[-1] == 3
    with (run / "metrics.jsonl").open("a") as file:
        file.write(line[7:] + "\n")
    assert delivery.deliver() and steps_of(server)[-1] == 9


def test_a_table_that_is_refused_keeps_no_metrics_back(run: Path, server: Server) -> None:
    said: list[str] = []
    server.takes_tables = False
    delivery = deliver(run, server, said)
    assert delivery.deliver() and steps_of(server) == [1, 2, 2, 3] and server.tables == []
    assert said == ["[WARNING] fake took no table of step 2: no tables here"]


def test_one_process_at_a_time(run: Path, server: Server) -> None:
    first = deliver(run, server)
    with pytest.raises(BlockingIOError, match="another process is sending this run to fake"):
        deliver(run, server)
    first.close(0)
    deliver(run, server).close(0)


def test_a_record_that_is_not_there_yet(tmp_path: Path, server: Server) -> None:
    delivery = deliver(tmp_path, server)
    assert delivery.deliver() and server.metrics == []
    append(tmp_path, 1, a=1.0)
    assert delivery.deliver() and steps_of(server) == [1]
