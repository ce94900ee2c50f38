"""What can be known to fail before it is submitted. Every problem of a sweep is reported at
once.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from pathlib import Path

from jobs.slurm import Slurm
from jobs.submit.options import SlurmOptions
from jobs.submit.plan import Plan
from jobs.submit.shape import Shape
from jobs.submit.snapshot import image_digest
from trainer.base.errors import UserError, nearest
from trainer.base.precision import planned
from trainer.checkpoint.store.retention import predicted_save_s
from trainer.config import Config
from trainer.plan import memory
from trainer.plan.model import folder_of
from trainer.plan.model import shape_of as model_shape_of


def problems_of(plan: Plan, options: SlurmOptions, slurm: Slurm) -> list[str]:
    """Messages for all that the site or the folders would refuse; empty when the plan can go."""
    found: list[str] = []
    partitions = slurm.partitions()
    for shape in {batch.shape: None for batch in plan.batches}:
        found += _site_problems(shape, options, slurm, partitions)
    graces = {batch.shape: grace_of(batch.shape, options, slurm) for batch in plan.batches}
    for job in plan.jobs:
        found += folder_problems(job.run, job.shape.cluster.local_folders)
        found += input_problems(job.checked)
        found += grace_problems(job.checked, job.shape, options, graces[job.shape])
    return list(dict.fromkeys(found))


def _site_problems(
    shape: Shape, options: SlurmOptions, slurm: Slurm, partitions: list[str]
) -> list[str]:
    partition = options.partition or shape.cluster.partition
    found: list[str] = []
    if partition and partitions and any(one not in partitions for one in partition.split(",")):
        return [
            f"partition '{partition}' is not known to Slurm, which has {', '.join(partitions)}"
            f"{nearest(partition, partitions) or '.'} Set cluster.partition or "
            "hydra.launcher.partition."
        ]
    if shape.gpus_per_node:
        most = slurm.gpus_per_node(partition)
        if most is not None and shape.gpus_per_node > most:
            found.append(
                f"trainer.n_gpus_per_node={shape.gpus_per_node}, but the nodes of partition "
                f"'{partition or 'default'}' "
                f"have {most} GPUs; use at most that and more trainer.nnodes."
            )
    nodes = slurm.most_nodes(partition)
    if nodes is not None and shape.nodes > nodes:
        found.append(
            f"{shape.nodes_key}={shape.nodes}, but a job of partition '{partition or 'default'}' "
            f"gets at most {nodes} "
            "nodes; use fewer, or another partition."
        )
    limit = slurm.partition_seconds(partition, "MaxTime")
    if limit is not None and options.timeout_min * 60 > limit:
        found.append(
            f"hydra.launcher.timeout_min={options.timeout_min} is above the partition's MaxTime of "
            f"{limit // 60} min."
        )
    return found + derived_problems(shape, options) + _image_problems(shape)


def derived_problems(shape: Shape, options: SlurmOptions) -> list[str]:
    """Sizes given a second time under ``hydra.launcher`` must agree with the config's own."""
    own = {
        "nodes": shape.nodes,
        "tasks_per_node": shape.ranks_per_node,
        "gpus_per_node": shape.gpus_per_node,
    }
    key = {"nodes": shape.nodes_key, "tasks_per_node": "trainer.n_gpus_per_node"}
    given = options.gpus_per_task
    per_task = f"hydra.launcher.gpus_per_task={given}, but each task is a rank, which has one GPU; leave it out."
    return [per_task] * (given not in (None, 1 if shape.gpus_per_node else 0)) + [
        f"hydra.launcher.{name}={getattr(options, name)} contradicts "
        f"{key.get(name, 'trainer.n_gpus_per_node')}={value}; leave it out: it follows from each "
        "job's config."
        for name, value in own.items()
        if getattr(options, name) not in (None, value)
    ]


def _image_problems(shape: Shape) -> list[str]:
    container = shape.container
    if container.runtime != "apptainer" or container.image is None:
        return []
    try:
        digest = image_digest(Path(container.image), cache_file())
    except UserError as error:
        return [str(error)]
    if container.digest and container.digest != digest:
        return [
            f"container.image={container.image} has digest {digest}, not "
            f"container.digest={container.digest}: the "
            "image was changed. Rebuild it, or set the digest to what is meant."
        ]
    return []


def cache_file() -> Path:
    """Where digests of images are remembered."""
    return (
        Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        / "plimsoll"
        / "digests.json"
    )


def folder_problems(run: Path, local_folders: tuple[str, ...]) -> list[str]:
    """A run folder must be writable here and seen by all nodes."""
    for folder in local_folders:
        if Path(folder) in run.parents:
            return [
                f"the run folder {run} lies in {folder}, which every node has for itself; put "
                "hydra.sweep.dir (or "
                "trainer.default_local_dir) on a shared file system."
            ]
    here = run
    while not here.exists():
        here = here.parent
    if not here.is_dir() or not os.access(here, os.W_OK | os.X_OK):
        return [
            f"the run folder {run} cannot be written: {here} is not a folder that you may write to."
        ]
    return []


def input_problems(config: Config) -> list[str]:
    """Files and folders that a job would look for in vain, after its wait in the queue."""
    model = config.actor_rollout_ref.model.path
    named: dict[str, str | list[str] | None] = {
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
        "custom_reward_function.path": config.custom_reward_function.path,
        # org/name is a model of the hub; what begins like a path is one
        "actor_rollout_ref.model.path": model
        if model and model.startswith(("/", "./", "../", "~"))
        else None,
    }
    found = []
    for key, value in named.items():
        for text in [value] if isinstance(value, str) else value or []:
            path = os.path.expanduser(text)
            if not os.path.exists(path) and not glob.glob(path, recursive=True):
                found.append(f"{key}={text}: there is no {os.path.abspath(path)} on this machine.")
    return found


def save_seconds(config: Config, shape: Shape) -> float:
    """Predicted time of one checkpoint at the site's write bandwidth, s; 0 for a model that isn't
    on this machine, and for built-in ones, which are small.

    Raises UserError when the model's folder is no decoder's.
    """
    path, actor = config.actor_rollout_ref.model.path, config.actor_rollout_ref.actor
    folder = None if not path or path.startswith("builtin:") else folder_of(path)
    if folder is None:
        return 0.0
    size = memory.checkpoint_bytes(
        model_shape_of(folder),
        precision=planned(actor.mixed_precision),
        zero_stage=actor.zero_stage,
        reference=config.actor_rollout_ref.ref.ema_interval is not None,
    )
    return predicted_save_s(size, bytes_per_s=shape.cluster.write_gb_s * 1e9)


@dataclass(frozen=True, kw_only=True)
class Grace:
    """What a preempted job gets before it is killed."""

    seconds: int
    source: str
    """Where that stands, for messages."""


def grace_of(shape: Shape, options: SlurmOptions, slurm: Slurm) -> Grace | None:
    """The site profile's word, else Slurm's own GraceTime; None where jobs aren't preempted with
    one.
    """
    if shape.cluster.grace_s is not None:
        return Grace(
            seconds=shape.cluster.grace_s, source=f"cluster.grace_s={shape.cluster.grace_s}"
        )
    found = slurm.partition_seconds(options.partition or shape.cluster.partition, "GraceTime")
    return Grace(seconds=found, source=f"its partition's GraceTime of {found} s") if found else None


def grace_problems(
    config: Config, shape: Shape, options: SlurmOptions, grace: Grace | None
) -> list[str]:
    """A checkpoint must fit between the warning and the end."""
    try:
        need = save_seconds(config, shape)
    except UserError as error:
        return [str(error)]
    found = []
    if need > options.signal_delay_s:
        found.append(
            f"a checkpoint is predicted to take {need:.0f} s "
            f"(cluster.write_gb_s={shape.cluster.write_gb_s}), but "
            f"hydra.launcher.signal_delay_s={options.signal_delay_s}; set it to "
            f"{int(need * config.trainer.checkpoint.save_margin) + 30} or more."
        )
    if grace is not None and need > grace.seconds:
        found.append(
            f"a checkpoint is predicted to take {need:.0f} s, but this site kills a preempted job "
            "after "
            f"{grace.source}; use a partition with a longer GraceTime, or one whose jobs aren't "
            "preempted "
            "(cluster.partition, cluster.qos)."
        )
    return found
