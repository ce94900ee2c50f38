"""Checkpoints that earlier versions wrote are still restored.

``old_checkpoints.tar.xz`` holds the folder ``checkpoints`` of a run that saved steps 1 and 2 with
the code of commit f23dfd2: one rank, the engine of ``crash_attempt.FakeEngine``, and a tensor that
is not the engine's.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

from tests.checkpoint.fork_server import ForkServer
from trainer.checkpoint.store import layout, manifest

ARCHIVE = Path(__file__).parent / "old_checkpoints.tar.xz"


def test_an_old_checkpoint_is_restored(fork_server: ForkServer, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(run, filter="data")
    newest = layout.newest_whole(run / layout.FOLDER)
    assert newest is not None and newest[0].name == "step_2"
    fork_server.start(
        "tests.checkpoint.crash_attempt:restore_old", 1, [str(run)], tmp_path / "log"
    ).finish()
    assert manifest.problems(*newest) == []
    assert {path.name for path in newest[0].parent.iterdir()} == {"latest", "step_1", "step_2"}
