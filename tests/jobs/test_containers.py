"""The image's definition and its builder, as far as they can be told without a network."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from tests.jobs.conftest import put

CONTAINERS = Path(__file__).parents[2] / "containers"


def test_definition_has_what_a_rank_needs() -> None:
    text = (CONTAINERS / "plimsoll.def").read_text()
    sections = re.findall(r"^%(\w+)", text, flags=re.MULTILINE)
    assert sections == ["labels", "files", "post", "environment", "test", "runscript"]
    assert "--no-deps -r /opt/plimsoll/cuda.txt" in text
    locked = (CONTAINERS.parent / "requirements/cuda.txt").read_text()
    major = re.search(r"^nvidia-cuda-runtime==(\d+\.\d+)", locked, re.MULTILINE)
    assert major and f"nvidia/cuda:{major.group(1)}" in text  # the toolkit that torch was built with
    for package in ("torch", "deepspeed", "transformers", "vllm", "submitit", "pydantic", "omegaconf", "ninja"):
        assert re.search(rf"^{package}==", locked, re.MULTILINE), package


def test_build_replaces_the_image_only_after_its_test_passed(tmp_path: Path) -> None:
    put(
        tmp_path,
        "apptainer",
        f"""
printf '%s\\n' "$*" >> {tmp_path}/calls
case $1 in build) cp "${{@: -1}}" "${{@: -2:1}}" ;; test) exit "${{TEST_CODE:-0}}" ;; esac""",
    )
    out = tmp_path / "x.sif"
    out.write_text("old")
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    command = ["bash", str(CONTAINERS / "build.sh"), str(out)]
    failed = subprocess.run(command, env={**env, "TEST_CODE": "1"}, capture_output=True, timeout=30, check=False)
    assert failed.returncode == 1 and out.read_text() == "old"
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=30, check=True)
    assert "plimsoll.locked sha256:" in out.read_text() and "@" not in out.read_text().split("%files")[0]
    assert re.search(r"container\.digest=sha256:[0-9a-f]{64}$", done.stdout.strip())


@pytest.mark.parametrize("script", sorted(CONTAINERS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(f"bash -n {shlex.quote(str(script))}", shell=True, check=True, timeout=10)
    assert os.access(script, os.X_OK)
