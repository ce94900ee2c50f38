"""What a rank sees inside an image: its own Slurm variables, never the shell's leftovers, and
secrets not in ps.
"""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from jobs.submit.binds import CACHES, bind_problems, binds_of, cache_binds, hf_home
from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.runtime import BatchPaths, task_script
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
    hub = tmp_path / "a b'c"
    hub.mkdir()
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
        "HF_HOME": str(hub),
        "TRITON_CACHE_DIR": "/nowhere",
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
        "HF_HOME": str(hub),
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


def test_hugging_faces_folder_stays_where_the_user_has_it(tmp_path: Path) -> None:
    """Models that were fetched on the login node lie there."""
    put(tmp_path, "apptainer", f'echo "$APPTAINERENV_HF_HOME" > {tmp_path}/seen')
    hub = tmp_path / ".cache/huggingface"
    hub.mkdir(parents=True)
    assert hf_home({"HOME": str(tmp_path)}) == str(hub)
    assert cache_binds({"HOME": str(tmp_path)}) == (str(hub),)
    assert hf_home({"HOME": str(tmp_path), "XDG_CACHE_HOME": "/nowhere"}) is None
    paths = BatchPaths(
        folder=tmp_path, code=tmp_path / "code", cache=tmp_path / "cache", hf_home=str(hub)
    )
    script = put(
        tmp_path, "task.sh", task_script(shape(runtime="apptainer", image="/i.sif"), paths)
    )
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    subprocess.run(["bash", str(script), "true"], env=env, check=True, timeout=200)
    assert (tmp_path / "seen").read_text() == f"{hub}\n"


def test_binds_hold_what_links_lead_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("data", "far/rows", "hub/models--a--b/snapshots/1", "hub/models--a--b/blobs"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "far/rows/x.jsonl").touch()
    (tmp_path / "data/x.jsonl").symlink_to(tmp_path / "far/rows/x.jsonl")
    (tmp_path / "hub/models--a--b/blobs/1f").touch()
    snapshot = tmp_path / "hub/models--a--b/snapshots/1"
    (snapshot / "config.json").symlink_to("../../blobs/1f")
    (tmp_path / "train.jsonl").symlink_to("data/x.jsonl")
    rows, data = str(tmp_path / "far/rows"), str(tmp_path / "data")
    assert binds_of([{"data": {"train_files": ["data/x.jsonl"]}}]) == (data, rows)
    assert binds_of([{"data": {"train_files": "data/*.jsonl"}}]) == (data, rows)
    assert binds_of([{"data": {"train_files": "data"}}]) == (data, rows)
    # a name without a folder is a path of this folder
    assert binds_of([{"data": {"val_files": "train.jsonl"}}]) == (str(tmp_path),)
    assert binds_of([{"actor_rollout_ref": {"model": {"path": str(snapshot)}}}]) == (
        str(tmp_path / "hub/models--a--b/blobs"),
        str(snapshot),
    )


@pytest.mark.parametrize("form", ["file://{}/mirror/new", "{}/mirror/new"])
def test_the_folder_of_a_mirror_is_bound_before_it_is_there(tmp_path: Path, form: str) -> None:
    (tmp_path / "mirror").mkdir()
    url = form.format(tmp_path)
    assert binds_of([{"trainer": {"default_hdfs_dir": url}}]) == (f"{tmp_path}/mirror",)
    assert binds_of([{"trainer": {"default_hdfs_dir": "s3://bucket/x"}}]) == ()


def test_no_folder_of_the_image_is_bound_over(tmp_path: Path) -> None:
    (tmp_path / "linked.json").symlink_to("/etc/hostname")
    assert binds_of([{"data": {"train_files": f"{tmp_path}/linked.json"}}]) == (
        "/etc/hostname",
        str(tmp_path),
    )
    assert binds_of([{"data": {"train_files": "/etc"}}]) == ()


def test_a_path_that_can_t_be_bound_is_named(tmp_path: Path) -> None:
    (tmp_path / "a:b.jsonl").touch()
    (message,) = bind_problems({"data": {"train_files": [f"{tmp_path}/a:b.jsonl", "s3://x:1/y"]}})
    assert message.startswith(f"data.train_files={tmp_path}/a:b.jsonl: ")


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
