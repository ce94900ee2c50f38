"""A small file is replaced whole, for its owner alone, or stays as it was."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

import pytest

from trainer.base import atomic


def test_the_new_text_replaces_the_old_and_is_private(tmp_path: Path) -> None:
    path = tmp_path / "note.json"
    path.write_text("old")
    path.chmod(0o644)
    atomic.write_json(path, {"b": 1, "a": [None]})
    assert json.loads(path.read_text()) == {"a": [None], "b": 1}
    assert path.stat().st_mode & 0o777 == 0o600
    assert os.listdir(tmp_path) == ["note.json"]


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_that_fails_leaves_the_old_text_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, durable: bool
) -> None:
    path = tmp_path / "note"
    atomic.write_text(path, "old", durable=durable)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(atomic.os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        atomic.write_text(path, "new", durable=durable)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["note"]


def test_file_and_folder_are_synced_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(descriptor: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    monkeypatch.setattr(atomic.os, "fsync", fsync)
    atomic.write_text(tmp_path / "note", "x")
    assert [Path(path).name.startswith(".note.") for path in synced] == [True, False]
    assert synced[1] == str(tmp_path)
    atomic.write_text(tmp_path / "note", "y", durable=False)
    assert len(synced) == 2


def test_a_reader_never_sees_half_of_it(tmp_path: Path) -> None:
    path = tmp_path / "note"
    texts = {letter * 20_000 for letter in "ab"}
    atomic.write_text(path, "a" * 20_000, durable=False)
    stop = threading.Event()

    def write() -> None:
        while not stop.is_set():
            for text in texts:
                atomic.write_text(path, text, durable=False)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        assert all(path.read_text() in texts for _ in range(2_000))
    finally:
        stop.set()
        writer.join()
