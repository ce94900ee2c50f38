"""Caches of libraries go where something can be written, and what is set otherwise is named."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from trainer.base import caches
from trainer.base.caches import places, prepare, replacements
from trainer.base.errors import UserError


@pytest.fixture
def below_a_file(tmp_path: Path) -> Path:
    """A place where root can't write either."""
    (tmp_path / "file").touch()
    return tmp_path / "file" / "home"


def test_a_home_that_can_be_written_stays_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    env = {"HOME": str(tmp_path / "home")}  # made by whoever needs it
    prepare(tmp_path / "run", env)
    assert env == {"HOME": str(tmp_path / "home")} and not list(tmp_path.iterdir())
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("home", ["below a file", "read-only", "full", "none"])
def test_a_home_that_cannot_be_written(
    tmp_path: Path,
    below_a_file: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    home: str,
) -> None:
    folder, problem = {
        "below a file": (str(below_a_file), "can't be written (Not a directory)"),
        "read-only": ("/proc/self", "/proc/self can't be written ("),
        "full": ("/full", "No space left on device"),
        "none": ("", "this user has no home folder"),
    }[home]
    env = {"HOME": folder} if folder else {}
    if home == "full":
        monkeypatch.setattr(caches.tempfile, "TemporaryFile", _full)
    if home == "none":
        monkeypatch.setattr(os.path, "expanduser", lambda path: path)
    run = tmp_path / "run"
    prepare(run, env)
    expected = {name: str(run / "caches" / name.lower()) for name in places({})}
    assert {name: env[name] for name in places({})} == expected
    warning = capsys.readouterr().err
    assert warning.count("\n") == 1 and problem in warning and f"{run}/caches" in warning
    assert all(name in warning for name in expected)


def _full(dir: Path) -> None:
    raise OSError(28, os.strerror(28), str(dir))


def test_only_what_cannot_be_written_is_moved(tmp_path: Path, below_a_file: Path) -> None:
    env = {
        "HOME": str(tmp_path),
        "TRITON_CACHE_DIR": str(below_a_file / "triton"),
        "VLLM_CACHE_ROOT": str(tmp_path / "vllm"),
    }
    moved = replacements(env, tmp_path / "run")
    assert moved == {
        "TRITON_CACHE_DIR": (
            tmp_path / "run/triton_cache_dir",
            f"{below_a_file.parent} can't be written (Not a directory)",
        )
    }
    env = {"HOME": str(below_a_file), "XDG_CACHE_HOME": str(tmp_path)}
    assert set(replacements(env, tmp_path / "run")) == {
        *("TRITON_CACHE_DIR", "MPLCONFIGDIR", "WANDB_DATA_DIR", "FLASHINFER_WORKSPACE_BASE")
    }


def test_models_of_others_are_read_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    env = {"HOME": "/nowhere", "HF_HOME": "/proc/self"}
    assert "HF_HOME" not in replacements(env, Path("/run"))
    assert places(env)["HF_HOME"] == Path("/proc/self")


def test_no_folder_for_temporary_files(
    tmp_path: Path, below_a_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, problem in (
        (below_a_file, "can't be written .Not a directory."),
        (tmp_path / "missing", "is no folder"),
    ):
        with pytest.raises(UserError, match=rf"^TMPDIR={folder}: .*{problem}; set TMPDIR to a fol"):
            prepare(tmp_path, {"HOME": str(tmp_path), "TMPDIR": str(folder)})

    def full() -> str:
        raise FileNotFoundError(2, "No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", full)
    with pytest.raises(UserError, match=r"free space in /tmp, or set TMPDIR to a folder"):
        prepare(tmp_path, {"HOME": str(tmp_path)})
