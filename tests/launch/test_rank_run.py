"""Which of a rank's errors are its own, the user's, or another process's."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from trainer.base import rank_records
from trainer.base.errors import EXIT_BAD_NODE, Failure, PeerLost, UserError
from trainer.launch.rank_run import kind_of, run_rank
from trainer.ranks.agreement import AgreedError
from trainer.rollout import EngineFailed


def caused_by(error: Exception, cause: Exception) -> Exception:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        ("user_error", UserError("data.x")),
        ("user_error", AgreedError("data.x")),
        ("user_error", PermissionError(errno.EACCES, "Permission denied", "/data/x")),
        ("user_error", OSError(errno.ENOSPC, "No space left on device")),
        ("lost_peer", PeerLost("1 of 2 ranks did not come")),
        # What torch 2.13 says with gloo
        (
            "lost_peer",
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by "
                "peer [127.0.0.1]:12004"
            ),
        ),
        (
            "lost_peer",
            RuntimeError(
                "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out "
                "waiting 1800000ms for recv operation to complete"
            ),
        ),
        ("lost_peer", RuntimeError("writev [10.0.0.1]:2001: Broken pipe")),
        ("lost_peer", dist.DistNetworkError("failed to recv, got 0 bytes")),
        ("lost_peer", dist.DistStoreError("wait timeout after 600000ms, keys: /joined/1")),
        # and with NCCL
        (
            "lost_peer",
            dist.DistBackendError(
                "NCCL error in: ProcessGroupNCCL.cpp:3356, remote process exited or there was a "
                "network error, NCCL version 2.27.5"
            ),
        ),
        (
            "lost_peer",
            RuntimeError("[Rank 1] Watchdog caught collective operation timeout: WorkNCCL(...)"),
        ),
        ("lost_peer", caused_by(Failure("not saved"), RuntimeError("Connection reset by peer"))),
        ("crash", RuntimeError("CUDA error: an illegal memory access was encountered")),
        ("crash", dist.DistBackendError("NCCL error: unhandled cuda error")),
        ("crash", EngineFailed("3 restarts in a row")),
        ("crash", SystemExit(0)),
        # a user's own connection, not the ranks'
        ("crash", ConnectionResetError(errno.ECONNRESET, "Connection reset by peer")),
        ("crash", KeyError("Connection")),
    ],
)
def test_kind(kind: str, error: BaseException) -> None:
    assert kind_of(error) == kind


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    for name in ("RANK", "PLIMSOLL_SLURM", "PLIMSOLL_LAUNCHED"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "3")
    yield tmp_path / "logs/attempt_3"


def test_a_record_of_every_return(tmp_path: Path, folder: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    for code, kind in ((0, "finished"), (85, "stopped")):
        assert run_rank(tmp_path, lambda code=code: code) == code
        end = rank_records.read_records(folder)[0].end
        assert end is not None and (end.kind, end.exit_code, end.step) == (kind, code, 7)


def test_a_stop_keeps_the_step_and_the_cause_that_were_saved(tmp_path: Path, folder: Path) -> None:
    def body() -> int:
        assert rank_records.read_records(folder)[0].end is None  # an earlier one is gone
        rank_records.write_end(folder, 0, kind="stopped", exit_code=85, step=4, stop="TIME")
        return 85

    rank_records.write_end(folder, 0, kind="finished", exit_code=0)
    assert run_rank(tmp_path, body) == 85
    end = rank_records.read_records(folder)[0].end
    assert end is not None and (end.step, end.stop) == (4, "TIME")


def test_sys_exit_is_an_error(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def body() -> int:
        raise SystemExit(0)

    assert run_rank(tmp_path, body) == 1
    assert "SystemExit: 0" in capsys.readouterr().err


def test_a_node_that_cannot_write_to_the_run_folder_is_bad(
    tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "logs").write_text("in the way")
    assert run_rank(tmp_path, lambda: 0) == EXIT_BAD_NODE
    assert "can't write to the run folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", '{"kind": 7}', '{"kind": "finishe'],
)
def test_a_record_that_is_cut_short_says_nothing(folder: Path, text: str) -> None:
    folder.mkdir(parents=True)
    rank_records.end_file(folder, 0).write_text(text)
    assert rank_records.read_records(folder) == {0: rank_records.RankRecord()}
