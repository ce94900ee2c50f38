"""The banner names everything that decides a result."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from trainer.tracking import banner as module
from trainer.tracking.banner import banner, git_commit, image_digest, version_of

REPOSITORY = Path(__file__).parents[2]


def test_the_banner_names_everything_that_decides_a_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PLIMSOLL_IMAGE_DIGEST", "sha256:abc")
    monkeypatch.setenv("PLIMSOLL_GIT_COMMIT", "c0ffee")
    text = banner(
        tmp_path, world_size=1, local_size=1, device="cpu", sizes={"parameters": "3M", "dp": 1}
    )
    rows = {line[2:16].strip(): line[16:].strip() for line in text.splitlines()[1:]}
    assert (
        rows["torch"] == torch.__version__
        and rows["deepspeed"] == version_of("deepspeed") != "none"
    )
    assert rows["python"] == sys.version.split()[0]
    assert rows["image"] == "sha256:abc" and rows["git commit"] == "c0ffee"
    assert rows["world"] == "1 rank(s), 1 on this node" and rows["sizes"] == "parameters=3M dp=1"
    assert rows["run folder"] == str(tmp_path) and rows["device"] == "cpu"
    assert set(rows) >= {"CUDA", "driver", "vllm"}


def git(folder: Path, *arguments: str) -> str:
    identity = ["-c", "user.name=n", "-c", "user.email=e@e"]
    done = subprocess.run(
        ["git", "-C", str(folder), *identity, *arguments],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def test_the_commit_is_that_of_this_code_and_marks_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PLIMSOLL_GIT_COMMIT", raising=False)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    assert git_commit(package) == "unknown"
    git(tmp_path, "init", "-q")
    assert git_commit(package) == "unknown"  # installed inside somebody else's repository
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "first")
    head = git(tmp_path, "rev-parse", "HEAD")
    assert git_commit(package) == head
    (package / "__init__.py").write_text("changed = True")
    assert git_commit(package) == head + "+changes"


def test_missing_things_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert version_of("no-such-distribution") == "none"
    assert (
        image_digest({}) == "none" and image_digest({"APPTAINER_CONTAINER": "/a.sif"}) == "/a.sif"
    )


def test_the_driver_is_read_from_the_kernel(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build\n"
        "GCC version: 12"
    )
    monkeypatch.setattr(module.Path, "read_text", lambda self: line)
    assert module.driver_version() == "570.86.15"
