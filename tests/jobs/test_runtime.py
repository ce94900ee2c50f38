"""What a rank sees inside an image: its own Slurm variables, never the shell's leftovers, and
secrets not in ps.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.runtime import CACHES, BatchPaths, binds_of, task_script
from jobs.submit.shape import Shape
from tests.jobs.conftest import put, until


def shape(**container: object) -> Shape:
    return Shape(
        nodes=1,
        ranks_per_node=1,
        gpus_per_node=1,
        cluster=Cluster(env=("MY_TOKEN",)),
        container=Container(**container),
    )


def test_environment_of_an_image(tmp_path: Path) -> None:
    put(tmp_path, "apptainer", f'env > {tmp_path}/env; printf "%s\\n" "$@" > {tmp_path}/args')
    paths = BatchPaths(
        folder=tmp_path, code=tmp_path / "code", cache=tmp_path / "cache", binds=("/data",)
    )
    script = put(
        tmp_path, "task.sh", task_script(shape(runtime="apptainer", image="/i.sif"), paths)
    )
    env = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_PROCID": "3",
        "CUDA_VISIBLE_DEVICES": "1",
        "WANDB_API_KEY": "k3y",
        "MY_TOKEN": "t",
        "MY_TOKEN_2": "no",
        "LD_LIBRARY_PATH": "/host",
        "PYTHONPATH": "/host",
        "PLIMSOLL_RUN": "/run dir",
        "HF_HOME": "/a b'c",
    }
    subprocess.run(["bash", str(script), "python3", "-m", "x y"], env=env, check=True, timeout=200)
    seen = dict(
        line.split("=", 1) for line in (tmp_path / "env").read_text().splitlines() if "=" in line
    )
    inside = {
        name.removeprefix("APPTAINERENV_"): v
        for name, v in seen.items()
        if name.startswith("APPTAINERENV_")
    }
    cached = {
        name: str(tmp_path / "cache" / name) for name in CACHES if name != "HF_HOME"
    }  # there is no home
    assert inside == cached | {
        "SLURM_PROCID": "3",
        "CUDA_VISIBLE_DEVICES": "1",
        "WANDB_API_KEY": "k3y",
        "MY_TOKEN": "t",
        "HF_HOME": "/a b'c",
        "PLIMSOLL_RUN": "/run dir",
        "PYTHONPATH": str(tmp_path / "code"),
    }
    args = (tmp_path / "args").read_text().splitlines()
    assert "k3y" not in " ".join(args) and "--cleanenv" in args and "--nv" in args
    assert args[-6:] == [
        "env",
        "--block-signal=USR2",
        "--block-signal=TERM",
        "python3",
        "-m",
        "x y",
    ]
    assert args.index("/i.sif") > args.index("--bind")  # options before the image


def test_a_signal_before_the_handler_waits_instead_of_killing(tmp_path: Path) -> None:
    paths = BatchPaths(folder=tmp_path, code=tmp_path / "code", cache=tmp_path / "cache")
    script = put(tmp_path, "task.sh", task_script(shape(), paths))
    code = (
        "import signal, sys, time\n"
        f"open({str(tmp_path / 'up')!r}, 'w').close()\n"
        f"while not __import__('os').path.exists({str(tmp_path / 'sent')!r}): time.sleep(0.01)\n"
        "signal.signal(signal.SIGUSR2, lambda *a: sys.exit(85))\n"
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR2])\n"
        "time.sleep(300)\n"
    )
    process = subprocess.Popen(["bash", str(script), "python3", "-c", code])
    until((tmp_path / "up").exists)
    process.send_signal(signal.SIGUSR2)
    (tmp_path / "sent").touch()
    assert process.wait(timeout=200) == 85


def test_binds_are_the_folders_that_the_configs_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data/inner", "model", "runs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "data/train.jsonl").touch()
    config = {
        "data": {
            "train_files": ["data/train.jsonl", f"{tmp_path}/data/inner"],
            "val_files": "data/*.jsonl",
        },
        "model": {"path": f"{tmp_path}/model", "name": "org/model-that-is-no-folder"},
        "container": {"image": f"{tmp_path}/runs"},
        "text": "a/b: not, a\n/path",
    }
    assert binds_of([config]) == (f"{tmp_path}/data", f"{tmp_path}/model")
