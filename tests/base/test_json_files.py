"""No damage in a small file ends a command: every reader leaves out what it can't use."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jobs import ledger, records
from jobs.attempt import bookkeeping
from jobs.evidence import read_evidence
from jobs.ledger import Entry
from jobs.run_state import state_of
from jobs.view import logs
from jobs.view.curves import read_curves
from trainer.base import json_files, metrics_file
from trainer.base.errors import UserError
from trainer.base.json_files import MAX_LINE_BYTES, read_lines, read_object, read_word
from trainer.base.model_shape import ModelShape
from trainer.base.rank_records import END_FIELDS, begin_file, end_file, read_records
from trainer.base.run_folder import RECORD_FIELDS, last_attempt, log_tail, read_json
from trainer.base.yaml_files import require_readable
from trainer.checkpoint.store import manifest
from trainer.checkpoint.store.layout import read_latest
from trainer.checkpoint.store.lease import _describe, _is_alive_on_this_host
from trainer.checkpoint.store.manifest import DamagedError
from trainer.data.chat_template import read_template
from trainer.launch.rollout_nodes import address_file, find_agent
from trainer.rollout.vllm.client.status_file import StatusFile
from trainer.tracking.goodput import earlier_attempts
from trainer.tracking.wandb_run import load_identity

NAMES = [name for fields in RECORD_FIELDS.values() for name in fields]
NAMES += ["id", "project", "group", "slots", "host", "port", "token", "run", *END_FIELDS]
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from([10**400, -1, 2**63, 1e308, float("nan"), float("inf")])
    | st.floats()
    | st.text(st.characters(), max_size=8)
    | st.sampled_from(["\0", "\ud800", "x" * 5000, "", ".."]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.sampled_from([*NAMES, "step"]), VALUES, max_size=8)
LINES = st.one_of(
    OBJECTS.map(lambda value: json.dumps(value).encode()),
    VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(max_size=40),
    st.sampled_from([b"[" * 100_000, b'{"a":' * 50_000, b"\xff", b"\0" * 30, b"9" * 5000]),
)
FILES = st.lists(LINES, max_size=4).map(b"\n".join)


def entry(run: Path) -> Entry:
    return Entry(
        name="s/0",
        sweep="s",
        run=str(run),
        signature="x",
        overrides=(),
        shape="1n1g",
        gpus=1,
        launch="L",
    )


def read_everything(run: Path) -> None:
    """Every reader of small files, and what uses their values."""
    log_tail(run / "log")
    load_identity(run)
    read_latest(run)
    read_records(run / "logs/attempt_1")
    find_agent(run, 0, 0.0)
    list(earlier_attempts(run, 2))
    read_curves(run, lambda name: True)
    metrics_file.last_values(run / "metrics.jsonl")
    metrics_file.by_step(run / "metrics.jsonl")
    file = StatusFile(run, "status")
    file.path = run / "status.json"
    file.read()
    holder = (run / "holder").read_bytes()[:4096]
    _is_alive_on_this_host(holder)
    _describe(holder)
    with pytest.raises((UserError, DamagedError)):
        manifest.parse(holder, "folder")
    with pytest.raises(UserError):
        ModelShape.from_folder(run)
    for line in ledger.read(run / "ledger.jsonl"):
        state_of(line, read_evidence(line), None, now=0.0)
    state_of(entry(run), read_evidence(entry(run)), None, now=0.0)
    records.attempts(run)
    bookkeeping.last_step(run)


def damaged(run: Path, data: bytes) -> None:
    (run / "logs/attempt_1").mkdir(parents=True)
    (run / "rendezvous").mkdir()
    names = ["wandb.json", "latest", "metrics.jsonl", "status.json", "holder"]
    names += ["config.json", "ledger.jsonl", "attempts.jsonl", "job.json", "log"]
    names += ["cancel.json", "logs/attempt_1/begin.json", "logs/attempt_1/clock.json"]
    paths = [*(run / name for name in names), address_file(run, 0)]
    paths += [file(run / "logs/attempt_1", 0) for file in (begin_file, end_file)]
    for path in paths:
        path.write_bytes(data)


@settings(max_examples=60, deadline=None)
@given(FILES)
def test_no_contents_end_a_reader(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        damaged(Path(folder), data)
        read_everything(Path(folder))


@pytest.mark.exhaustive
@settings(max_examples=3000, deadline=None)
@given(FILES)
def test_no_contents_end_a_reader_in_long(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        damaged(Path(folder), data)
        read_everything(Path(folder))


def folder_instead(path: Path) -> None:
    path.mkdir()


def pipe_instead(path: Path) -> None:
    os.mkfifo(path)


def loop_instead(path: Path) -> None:
    path.symlink_to(path)


@pytest.mark.parametrize("make", [folder_instead, pipe_instead, loop_instead])
def test_something_else_than_a_file(make: Callable[[Path], None], tmp_path: Path) -> None:
    make(tmp_path / "x.json")
    assert read_object(tmp_path / "x.json") == {} and read_word(tmp_path / "x.json") is None
    assert read_lines(tmp_path / "x.json") == []
    assert list(metrics_file.read_metrics(tmp_path / "x.json")) == []
    assert metrics_file.read_tail(tmp_path / "x.json") == []
    with pytest.raises(UserError, match=r"the ledger .*x\.json can't be read"):
        ledger.read(tmp_path / "x.json")
    (tmp_path / "logs").write_text("")
    assert last_attempt(tmp_path) == last_attempt(Path("a\0b")) == 0


def test_the_lines_around_a_damaged_one_count(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "attempts.jsonl"
    good = {"attempt": 1, "cause": "done", "why": "finished"}
    wrong: list[Any] = [{"attempt": 2, "cause": 7, "why": "x"}, {"attempt": 2}, [1], "é"]
    lines = [json.dumps(value).encode() for value in [good, *wrong, good | {"attempt": 3}]]
    path.write_bytes(b"\n".join([b"\xff", *lines, b'{"attempt": 4, "ca']))
    for _ in range(2):
        assert [line["attempt"] for line in records.attempts(tmp_path)] == [1, 3]
    said = capsys.readouterr().err
    assert said.count("[WARNING]") == 1 and "the first is line 1" in said and str(path) in said


def test_a_line_being_written_is_no_damage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x").write_bytes(b'{"a": 1}\n{"a": ')
    assert read_lines(tmp_path / "x") == [{"a": 1}] and not capsys.readouterr().err


def test_a_field_of_the_wrong_kind_is_as_if_it_were_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "begin.json"
    path.write_text('{"start": "soon", "step": 4, "pid": 1e99, "other": [1]}')
    assert read_json(path) == {"step": 4, "other": [1]}
    assert "holds no usable pid, start" in capsys.readouterr().err


def test_a_huge_line_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files, "MAX_LINE_BYTES", 1000)
    huge = json.dumps({"a": "x" * 300_000}).encode()
    (tmp_path / "x").write_bytes(b'{"a": 1}\n' + huge + b'\n{"a": 2}\n')
    assert read_lines(tmp_path / "x") == [{"a": 1}, {"a": 2}]
    lengths = [len(line) for line, _ in json_files.split_lines(tmp_path / "x")]
    assert lengths[1] < 1000 + (1 << 16) + 2 and MAX_LINE_BYTES > 1 << 20


@pytest.mark.parametrize("make", [folder_instead, pipe_instead, loop_instead])
def test_something_else_than_a_file_that_was_named(
    make: Callable[[Path], None], tmp_path: Path
) -> None:
    """It is refused and not waited for: a pipe has no writer, a device no end."""
    make(tmp_path / "config.json")
    with pytest.raises(UserError, match=r"config\.json can't be read"):
        ModelShape.from_folder(tmp_path)
    make(tmp_path / "settings.yaml")
    with pytest.raises(UserError, match=r"settings\.yaml can't be read"):
        require_readable(tmp_path / "settings.yaml")
    make(tmp_path / "template.jinja")
    with pytest.raises(UserError, match=r"template\.jinja is neither a Jinja text nor a readable"):
        read_template(str(tmp_path / "template.jinja"))
    (tmp_path / "logs/attempt_1").mkdir(parents=True)
    make(tmp_path / "logs/attempt_1/rank_0.log")
    if make is not loop_instead:  # which is as good as missing
        with pytest.raises(UserError, match=r"rank_0\.log can't be read .*: it is no log file"):
            logs.show(tmp_path, 1, 0, 10)
        make(tmp_path / "metrics.jsonl")
        with pytest.raises(OSError, match=r"metrics\.jsonl"):
            metrics_file.MetricsFile(tmp_path / "metrics.jsonl", 0)
