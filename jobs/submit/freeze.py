"""Write down a plan: run folders with frozen configs, the code snapshot, the scripts of every
batch.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from jobs.attempt.decision import budgets_from
from jobs.ledger import Entry
from jobs.submit.binds import binds_of, cache_binds, hf_home, outermost
from jobs.submit.options import SlurmOptions
from jobs.submit.plan import Job, JobBatch
from jobs.submit.runtime import BatchPaths, task_script
from trainer.base import atomic
from trainer.base.run_folder import DISPLAY_NAME, read_json
from trainer.config import freeze
from trainer.config.user_files import recorded_digests


def private_folder(path: Path) -> None:
    """Make ``path``; a new one is closed to other users."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)


def freeze_run(job: Job, record: Mapping[str, Any]) -> None:
    """Write ``config.yaml`` and ``job.json`` of a run, and copies of the user's files. A resumed
    run keeps what it was started with.
    """
    private_folder(job.run)
    os.chmod(job.run, 0o700)
    target = job.run / "config.yaml"
    if not (job.resumes and target.exists()):
        freeze(job.checked, job.run)
    atomic.write_json(job.run / "job.json", dict(record) | {"files": recorded_digests(job.run)})


def job_record(
    job: Job,
    options: SlurmOptions,
    *,
    sweep: str,
    name: str,
    display_name: str,
    launch: str,
    image: Mapping[str, Any],
    git: Mapping[str, Any],
    code: str,
) -> dict[str, Any]:
    """What ``job.json`` holds: how the run was launched, and the budgets that the batch script
    draws on. No secrets.
    """
    return {
        "name": name,
        DISPLAY_NAME: display_name,
        "sweep": sweep,
        "launch": launch,
        "overrides": list(job.overrides),
        "signature": job.signature,
        "cluster": job.shape.cluster.name,
        "nodes": job.shape.nodes,
        "ranks": job.shape.ranks,
        "tasks": job.shape.nodes * job.shape.ranks_per_node,
        "gpus": job.shape.gpus,
        "limit_s": options.timeout_min * 60,
        "signal_delay_s": options.signal_delay_s,
        "budgets": budgets_from(options),
        "image": dict(image),
        "git": dict(git),
        "code": code,
    }


def batch_paths(
    batch: JobBatch, sweep_dir: Path, submitit_folder: str | None, launch: str, code: str
) -> BatchPaths:
    """The folders of a batch. Submitit's placeholder ``%j`` is not used: one folder per array.
    ``code`` is the digest of its code.
    """
    base = Path(submitit_folder.replace("/%j", "")) if submitit_folder else sweep_dir / ".submitit"
    sweep = os.path.abspath(sweep_dir)
    named = binds_of(job.config for job in batch.jobs)
    binds = outermost(map(Path, (*named, *cache_binds(os.environ))))
    outer = {str(sweep), *(str(job.run) for job in batch.jobs)}
    wanted = [
        bind
        for bind in (*binds, *sorted(outer))
        if not any(bind.startswith(f"{folder}/") for folder in outer)
    ]
    return BatchPaths(
        folder=Path(os.path.abspath(base)) / f"{batch.name}-{launch}",
        code=Path(sweep) / "code" / code,
        cache=Path(sweep) / "cache",
        binds=tuple(dict.fromkeys(wanted)),
        hf_home=hf_home(os.environ),
    )


def files_of(batch: JobBatch, paths: BatchPaths) -> dict[str, str]:
    """What a batch script reads: the script of one process and that of the node check."""
    return {"task.sh": task_script(batch.shape, paths), "health.sh": health_script(batch)}


def health_script(batch: JobBatch) -> str:
    """``health.sh`` with this site's limits at its head."""
    cluster = batch.shape.cluster
    gpus = batch.shape.gpus_per_node if cluster.check_gpus else 0
    head = (
        f"#!/bin/bash\nGPUS={gpus} MIN_GPU_FREE_GB={cluster.min_gpu_free_gb:g} "
        f"MIN_DISK_GB={cluster.min_free_disk_gb:g} MIN_SHM_GB={cluster.min_shm_gb:g}\n"
    )
    return head + files("jobs.attempt").joinpath("health.sh").read_text()


def entry_of(job: Job, *, sweep: str, launch: str, script: str, now: float) -> Entry:
    """The ledger's line for a run before sbatch is asked. A resumed run keeps its name."""
    name = f"{sweep}/{job.index}"
    if job.resumes:
        name = str(read_json(job.run / "job.json").get("name") or name)
    return Entry(
        name=name,
        sweep=name.rpartition("/")[0],
        run=str(job.run),
        signature=job.signature,
        overrides=job.overrides,
        shape=job.shape.label(),
        gpus=job.shape.gpus,
        launch=launch,
        script=script,
        time=now,
    )
