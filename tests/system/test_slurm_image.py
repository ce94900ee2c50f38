"""Build the image's definition with real Apptainer, without the base and %post, which need a
network.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from tests.system.slurm_runs import ROOT

pytestmark = pytest.mark.system


def test_an_image_has_the_label_environment_and_run_script_of_its_definition(
    image: Path, tmp_path: Path
) -> None:
    text = (ROOT / "containers/plimsoll.def").read_text()
    text = re.sub(
        r"^Bootstrap: .*\nFrom: .*",
        f"Bootstrap: localimage\nFrom: {image}",
        text,
        flags=re.MULTILINE,
    )
    text = re.sub(r"^%post\n.*?(?=^%)", "", text, flags=re.MULTILINE | re.DOTALL).replace(
        "@COMMIT@", "c0ffee"
    )
    (tmp_path / "x.def").write_text(text)
    sif = str(tmp_path / "x.sif")

    def apptainer(*arguments: str, code: int = 0) -> str:
        env = {**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"}
        done = subprocess.run(
            ["apptainer", *arguments],
            capture_output=True,
            text=True,
            timeout=500,
            cwd=ROOT,
            env=env,
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout + done.stderr

    fast = ["--mksquashfs-args", "-comp gzip -Xcompression-level 1"]
    apptainer("--quiet", "build", "--notest", *fast, sif, str(tmp_path / "x.def"))
    assert "plimsoll.commit: c0ffee" in apptainer("inspect", "--labels", sif)
    assert "PYTHONNOUSERSITE=1" in apptainer("exec", "--cleanenv", sif, "env")
    locked = (ROOT / "requirements/cuda.txt").read_text()
    assert apptainer("exec", sif, "cat", "/opt/plimsoll/cuda.txt") == locked
    assert apptainer("run", sif, "basename", "/x/two  words") == "two  words\n"
    # %test runs up to Python, which %post would have installed.
    assert "python3: not found" in apptainer("test", "--cleanenv", sif, code=127)
