"""Every script shape, byte for byte. UPDATE_GOLDEN=1 writes them anew; look at the difference
before committing it.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.executor import make_executor
from jobs.submit.options import SlurmOptions
from jobs.submit.runtime import BatchPaths, task_script
from jobs.submit.script import script_of
from jobs.submit.shape import Shape

GOLDEN = Path(__file__).parent / "golden"
PLACE = BatchPaths(
    folder=Path("/runs/a sweep/.submitit/b"),
    code=Path("/runs/a sweep/code/c0de"),
    cache=Path("/runs/a sweep/cache"),
    binds=("/data/it's", "/models"),
)
IMAGES = {
    "gres-apptainer": {
        "path": "/images/plimsoll v1.sif",
        "digest": "sha256:d1",
        "file": "7 1.500000000",
        "verify": True,
    }
}
OPTIONS = SlurmOptions(timeout_min=90, signal_delay_s=180, array_parallelism=3)
SHAPES = {
    "cpu": Shape(
        nodes=1,
        ranks_per_node=2,
        gpus_per_node=0,
        cluster=Cluster(partition="low"),
        container=Container(),
    ),
    "gres-apptainer": Shape(
        nodes=3,
        rollout_nodes=1,
        ranks_per_node=8,
        gpus_per_node=8,
        cluster=Cluster(
            partition="gpu",
            account="a1",
            qos="normal",
            gpu_type="h100",
            cpus_per_task=12,
            mem_gb=500,
            setup=("module load apptainer",),
            sbatch_args=("--reservation=r1", "--exclusive"),
            srun_args=("--mpi=none",),
            env=("MY_TOKEN",),
        ),
        container=Container(
            runtime="apptainer", image="/images/plimsoll v1.sif", binds=("/scratch:/scratch:ro",)
        ),
    ),
    "gpus-per-node-pyxis": Shape(
        nodes=1,
        ranks_per_node=4,
        gpus_per_node=4,
        cluster=Cluster(gpu_style="gpus-per-node"),
        container=Container(runtime="pyxis", image="nvcr.io#x/plimsoll:1", python="/opt/python"),
    ),
    "gpus-per-task": Shape(
        nodes=1,
        ranks_per_node=2,
        gpus_per_node=2,
        cluster=Cluster(gpu_style="gpus-per-task"),
        container=Container(),
    ),
}


def rendered(name: str) -> dict[str, str]:
    shape = SHAPES[name]
    script = script_of(
        shape,
        OPTIONS,
        PLACE,
        sweep="s1",
        interpreter="/venv/bin/python",
        environment={"WANDB_RUN_GROUP": "s1"},
        image=IMAGES.get(name, {}),
    )
    executor = make_executor(script, PLACE.folder, "0" * 12)
    return {"batch": executor.text(7), "task": task_script(shape, PLACE)}


@pytest.mark.parametrize("name", SHAPES)
def test_scripts(name: str, fake: Path) -> None:
    for kind, text in rendered(name).items():
        path = GOLDEN / f"{name}.{kind}.sh"
        if os.environ.get("UPDATE_GOLDEN") == "1":
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
        assert text == path.read_text()
        subprocess.run(["bash", "-n", "-c", text], check=True, timeout=100)
