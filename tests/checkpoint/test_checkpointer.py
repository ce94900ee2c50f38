"""Which checkpoints a real checkpointer keeps, its metrics and its errors."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.fork_server import ForkServer
from tests.tracking.documented import undocumented
from trainer.checkpoint.metrics import CheckpointMetrics


def run_program(
    fork_server: ForkServer, folder: Path, program: str, size: int, env: dict[str, str]
) -> None:
    (folder / "run").mkdir()
    fork_server.start(
        f"tests.checkpoint.checkpointer_programs:{program}",
        size,
        [str(folder / "run"), str(folder / "store")],
        folder / "log",
        env=env,
    ).finish()


@pytest.mark.parametrize("program", ["keep_best", "metrics", "failed_copy"])
def test_one_rank(fork_server: ForkServer, tmp_path: Path, program: str) -> None:
    run_program(fork_server, tmp_path, program, 1, {"PLIMSOLL_GATE": str(tmp_path / "gate")})


@pytest.mark.parametrize(
    "program",
    ["read_only", "extra_tensors", "further_engines", "room", "restore_best", "not_finite"],
)
def test_two_ranks(fork_server: ForkServer, tmp_path: Path, program: str) -> None:
    (tmp_path / "fault").write_text("EROFS mkdir")
    env = {"PLIMSOLL_FAULT": str(tmp_path / "fault"), "PLIMSOLL_ROOM": str(tmp_path / "room")}
    run_program(fork_server, tmp_path, program, 2, env)


def test_every_metric_is_documented() -> None:
    metrics = CheckpointMetrics()
    metrics.set("copy_s", 1.0)
    metrics.add("skipped")
    metrics.record_commit(3, nbytes=10, seconds=2.0)
    assert undocumented(set(metrics.collect(1))) == set()
