"""Damage of any file is found, and the run goes back to the checkpoint before."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from xxhash import xxh3_128_hexdigest

from tests.checkpoint.fork_server import ROOT
from tests.checkpoint.test_power_cut import save
from tests.ranks.worlds import single_rank
from trainer import export
from trainer.base.errors import Failure, UserError
from trainer.base.metrics_file import MetricsFile
from trainer.checkpoint import resume
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import cleanup, layout, manifest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.lease import Lease
from trainer.checkpoint.store.mirror import Mirror


@pytest.fixture
def run(tmp_path: Path) -> Path:
    root = tmp_path / layout.FOLDER
    root.mkdir()
    for step in (1, 2):
        save(Disk(), root, step)
    return tmp_path


def resumed_step(run: Path, **settings: Any) -> int | None:
    found = resume.find_checkpoint(Disk(), run, CheckpointSettings(**settings), single_rank())
    return None if found is None else found[1].step


@pytest.mark.parametrize("name", ["manifest.json", "latest", "global_step/weights.pt"])
def test_a_changed_bit_or_length_is_damage(run: Path, name: str) -> None:
    path = run / layout.FOLDER / "step_2" / name
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, 1 + len(whole) // 7):
        data = bytearray(whole)
        data[bit // 8] ^= 1 << bit % 8
        path.write_bytes(data)
        newest = layout.newest_whole(run / layout.FOLDER)
        assert newest is not None and newest[1].step == 1, f"bit {bit} of {name} went unnoticed"
    for length in {*range(0, len(whole), 1 + len(whole) // 40), len(whole) - 1}:
        path.write_bytes(whole[:length])
        newest = layout.newest_whole(run / layout.FOLDER)
        assert newest is not None and newest[1].step == 1
    path.write_bytes(whole)
    newest = layout.newest_whole(run / layout.FOLDER)
    assert newest is not None and newest[1].step == 2


def test_a_damaged_newest_is_kept_as_corrupt_and_the_one_before_taken(run: Path) -> None:
    (run / layout.FOLDER / "step_2/global_step/weights.pt").unlink()
    assert resumed_step(run) == 1
    assert (run / layout.FOLDER / "step_2.corrupt").is_dir()


def test_a_run_with_only_damaged_checkpoints_is_no_new_run(run: Path) -> None:
    for step in (1, 2):
        (run / layout.FOLDER / f"step_{step}/latest").write_text("x")
    with pytest.raises(UserError, match="holds no whole checkpoint any more"):
        resumed_step(run)


def test_a_run_that_never_reached_its_first_checkpoint_begins_at_zero(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "metrics.jsonl").write_text("{}")
    (tmp_path / layout.FOLDER / "step_1.tmp-1-aa").mkdir(parents=True)
    cleanup.remove_leftovers(Disk(), tmp_path / layout.FOLDER)
    assert resumed_step(tmp_path) is None


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["manifest.json", "latest", "global_step/weights.pt", "listing"])
def test_a_file_that_cannot_be_read_is_no_damage(
    run: Path, monkeypatch: pytest.MonkeyPatch, name: str, number: int
) -> None:
    """The run stops and names the file; the next attempt, which can read it, resumes from it."""
    root = run / layout.FOLDER
    unreadable = root if name == "listing" else root / "step_2" / name

    def failing(real: Any) -> Any:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if str(path) == str(unreadable):
                raise OSError(number, os.strerror(number), str(path))
            return real(path, *args, **options)

        return call

    kind: type[Exception] = Failure
    if number == errno.EACCES:
        kind = UserError
    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", failing(Path.open))
        patch.setattr(Path, "read_bytes", failing(Path.read_bytes))
        patch.setattr(Path, "iterdir", failing(Path.iterdir))
        patch.setattr(manifest, "file_digest", failing(manifest.file_digest))
        with pytest.raises(kind) as caught:
            resumed_step(run)
        if name != "listing":
            with pytest.raises(UserError, match=re.escape(str(unreadable))):
                export.export(run, run / "out")
    assert str(unreadable) in str(caught.value) and os.strerror(number) in str(caught.value)
    assert sorted(p.name for p in root.iterdir() if p.is_dir()) == ["step_1", "step_2"]
    assert resumed_step(run) == 2


def test_a_renamed_checkpoint_is_not_another_step(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    root = run / layout.FOLDER
    shutil.copytree(root / "step_1", root / "step_400")
    assert resumed_step(run) == 2
    assert "step_400 holds step 1" in caplog.text and "rename it to step_1" in caplog.text
    newest = layout.newest_whole(root)
    assert newest is not None and newest[0].name == "step_2"
    assert (root / "step_400").is_dir()
    for step in (1, 2):
        shutil.rmtree(root / f"step_{step}")
    with pytest.raises(UserError, match="step_400"):
        resumed_step(run)
    path = str(root / "step_400")
    assert resumed_step(run, resume_mode="path", resume_from_path=path) == 1


def test_a_run_that_has_committed_never_begins_again_at_zero(run: Path) -> None:
    """All checkpoints were removed by hand; its metrics still name the last one."""
    record = MetricsFile(run / "metrics.jsonl", 0)
    for step, committed in ((1, -1.0), (2, -1.0), (3, 2.0)):
        record.append({"step": step, "ckpt/last_committed_step": committed})
    record.close()
    shutil.rmtree(run / layout.FOLDER)
    for _ in range(2):
        with pytest.raises(UserError, match=r"step 2 was committed.*experiment_name.*resume_from"):
            resumed_step(run)
        (run / layout.FOLDER).mkdir(exist_ok=True)
    (run / "metrics.jsonl").unlink()
    assert resumed_step(run) is None
    (run / layout.FOLDER / "global_step_7").mkdir()
    with pytest.raises(UserError, match="checkpoint of verl"):
        resumed_step(run)


def test_a_newer_format_is_refused_with_the_way_out(run: Path) -> None:
    path = run / layout.FOLDER / "step_2" / manifest.NAME
    body = json.loads(path.read_bytes())
    del body["digest"]
    body["format"] = 99
    body["digest"] = xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    path.write_text(json.dumps(body))
    with pytest.raises(UserError, match=r"format 99.*trainer\.export"):
        resumed_step(run)


def test_disable_refuses_a_run_that_has_checkpoints(run: Path) -> None:
    with pytest.raises(UserError, match="resume_mode=disable"):
        resumed_step(run, resume_mode="disable")


def test_a_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no whole checkpoint"):
        resumed_step(tmp_path, resume_mode="path", resume_from_path=str(tmp_path))


def test_two_jobs_on_one_run_and_a_dead_one(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from trainer.checkpoint.store.lease import Lease\n"
        "Lease(pathlib.Path(sys.argv[1]), 1); print('held', flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=ROOT,
    )
    assert other.stdout is not None and other.stdout.readline() == "held\n"
    with pytest.raises(UserError, match=f"another job is running.*process {other.pid}"):
        Lease(tmp_path, 2)
    path = tmp_path / "lease.json"
    elsewhere = {**json.loads(path.read_text()), "host": "another-machine"}
    path.write_text(json.dumps(elsewhere))
    with pytest.raises(UserError, match=r"another job is running.*on another-machine"):
        Lease(tmp_path, 2, linger_s=0.2)
    # A machine that is gone, whose lock the server drops some time later.
    threading.Timer(0.3, other.kill).start()
    lease = Lease(tmp_path, 2, linger_s=100.0)
    other.wait(100)
    assert lease.is_held()
    lease.release()


@pytest.mark.parametrize("slash", ["", "/"])
def test_mirror_is_a_checkpoint_only_with_its_manifest(
    run: Path, tmp_path: Path, slash: str
) -> None:
    mirror = Mirror(f"memory://{tmp_path.name}/mirror{slash}")
    folder = run / layout.FOLDER / "step_2"
    mirror.upload(folder, manifest.read(folder))
    assert mirror.steps() == [2]
    root = tmp_path / "elsewhere" / layout.FOLDER
    root.mkdir(parents=True)
    mirror.download(2, root, Disk(), "1-ab")
    newest = layout.newest_whole(root)
    assert newest is not None and newest[1].step == 2
    mirror._fs.rm(f"{mirror._root}/step_2/{manifest.NAME}")
    assert mirror.steps() == []
