"""The node check, with a fake nvidia-smi."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.freeze import health_script
from jobs.submit.plan import JobBatch
from jobs.submit.shape import Shape
from tests.jobs.conftest import put

SMI = """
case "$1" in
  *=index) printf "$INDEX" ;;
  *ecc*) printf "$ECC" ;;
  *memory*) printf "$FREE" ;;
esac
"""
FINE = {"INDEX": "0\\n1\\n", "ECC": "0\\n[N/A]\\n", "FREE": "0, 80000\\n1, 80000\\n"}


@pytest.mark.parametrize(
    ("env", "cluster", "why"),
    [
        (FINE, {}, None),
        (FINE | {"INDEX": "0\\n", "CUDA_VISIBLE_DEVICES": "0"}, {}, "1 GPUs, 2 wanted"),
        (FINE | {"ECC": "0\\n3\\n"}, {}, "3 uncorrected ECC errors"),
        (
            FINE | {"FREE": "0, 80000\\n1, 900\\n"},
            {"min_gpu_free_gb": 70},
            "GPU 1 has 900 MiB free",
        ),
        # Another job's GPU is full: not this job's concern.
        (
            FINE | {"FREE": "0, 80000\\n1, 900\\n", "CUDA_VISIBLE_DEVICES": "0"},
            {"min_gpu_free_gb": 70},
            None,
        ),
        (FINE, {"min_free_disk_gb": 1e7}, "GB free in"),
        (FINE, {"min_shm_gb": 1e7}, "/dev/shm"),
    ],
)
def test_health(
    env: dict[str, str], cluster: dict[str, float], why: str | None, tmp_path: Path
) -> None:
    put(tmp_path, "nvidia-smi", SMI)
    settings = Cluster(**({"min_free_disk_gb": 0.0} | cluster))
    shape = Shape(
        nodes=1, ranks_per_node=2, gpus_per_node=2, cluster=settings, container=Container()
    )
    script = put(tmp_path, "health.sh", health_script(JobBatch(name="b", shape=shape, jobs=())))
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", str(script), str(tmp_path)],
        env={"PATH": path, "SLURMD_NODENAME": "n7", **env},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    if why is None:
        assert done.returncode == 0 and done.stdout == "OK n7\n", done.stdout + done.stderr
    else:
        assert done.returncode == 77 and done.stdout.startswith("BAD n7: ") and why in done.stdout


def test_a_run_folder_that_the_node_cannot_write(tmp_path: Path) -> None:
    shape = Shape(
        nodes=1,
        ranks_per_node=1,
        gpus_per_node=0,
        cluster=Cluster(min_free_disk_gb=0.0),
        container=Container(),
    )
    script = put(tmp_path, "health.sh", health_script(JobBatch(name="b", shape=shape, jobs=())))
    done = subprocess.run(
        ["bash", str(script), "/proc/nowhere"],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 77 and "is it mounted here?" in done.stdout
