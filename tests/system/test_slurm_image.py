"""Build the image's definition with real Apptainer, without the base and %post, which need a
network.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from jobs.submit.binds import binds_of, cache_binds, hf_home
from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.runtime import BatchPaths, task_script
from jobs.submit.shape import Shape
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


def test_what_links_lead_to_and_the_default_cache_exist_inside(image: Path, tmp_path: Path) -> None:
    """A data file that is a link, and a model in Hugging Face's folder, whose files are links."""
    home = tmp_path / "home"
    hub = home / ".cache/huggingface/hub/models--a--b"
    for folder in (tmp_path / "data", tmp_path / "far", hub / "snapshots/1", hub / "blobs"):
        folder.mkdir(parents=True)
    (tmp_path / "far/rows.jsonl").write_text("row\n")
    (tmp_path / "data/rows.jsonl").symlink_to(tmp_path / "far/rows.jsonl")
    (hub / "blobs/1f").write_text("weights\n")
    (hub / "snapshots/1/model").symlink_to("../../blobs/1f")
    named = binds_of([{"data": {"train_files": f"{tmp_path}/data/rows.jsonl"}}])
    env = {"HOME": str(home)}
    run = tmp_path / "run"
    for folder in (run, tmp_path / "code"):
        folder.mkdir()
    paths = BatchPaths(
        folder=tmp_path,
        code=tmp_path / "code",
        cache=run / "cache",
        binds=(*named, *cache_binds(env), str(run)),
        hf_home=hf_home(env),
    )
    shape = Shape(
        nodes=1,
        ranks_per_node=1,
        gpus_per_node=0,
        cluster=Cluster(),
        container=Container(runtime="apptainer", image=str(image)),
    )
    (tmp_path / "task.sh").write_text(task_script(shape, paths))
    look = f'cat {tmp_path}/data/rows.jsonl "$HF_HOME/hub/models--a--b/snapshots/1/model"'
    done = subprocess.run(
        ["bash", str(tmp_path / "task.sh"), "sh", "-c", look],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PLIMSOLL_RUN": str(run), "PATH": f"{os.environ['PATH']}:/usr/sbin"},
    )
    assert done.stdout == "row\nweights\n", done.stderr
