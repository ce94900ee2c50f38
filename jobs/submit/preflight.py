"""Checks before a sweep is submitted. All its problems are reported at once."""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from jobs.slurm import Slurm
from jobs.submit.binds import bind_problems
from jobs.submit.options import SlurmOptions
from jobs.submit.plan import SweepPlan
from jobs.submit.script import argument_problems
from jobs.submit.shape import Shape
from jobs.submit.snapshot import image_digest
from trainer.base.errors import UserError, nearest
from trainer.base.home import expanded
from trainer.base.model_folder import require_model
from trainer.base.model_shape import ModelShape
from trainer.config import Config
from trainer.config.user_files import is_template
from trainer.plan import memory
from trainer.plan.model import critic_shape, folder_of
from trainer.plan.resource_sections import run_checkpoint_bytes


def problems_of(plan: SweepPlan, options: SlurmOptions, slurm: Slurm) -> list[str]:
    """Messages for all that the site or the folders would refuse; empty when all is well."""
    problems: list[str] = []
    partitions = slurm.partitions()
    for shape in {batch.shape: None for batch in plan.batches}:
        problems += _site_problems(shape, options, slurm, partitions)
    graces = {batch.shape: grace_of(batch.shape, options, slurm) for batch in plan.batches}
    for job in plan.jobs:
        problems += folder_problems(job.run, job.shape.cluster.local_folders)
        problems += input_problems(job.checked)
        if job.shape.container.runtime != "none":
            problems += bind_problems(job.config)
        problems += grace_problems(job.checked, job.shape, options, graces[job.shape])
    return list(dict.fromkeys(problems))


def _site_problems(
    shape: Shape, options: SlurmOptions, slurm: Slurm, partitions: list[str]
) -> list[str]:
    partition = options.partition or shape.cluster.partition
    problems: list[str] = []
    if partition and partitions and any(one not in partitions for one in partition.split(",")):
        return [
            f"partition '{partition}' is not known to Slurm, which has {', '.join(partitions)}"
            f"{nearest(partition, partitions) or '.'} Set cluster.partition or "
            "hydra.launcher.partition."
        ]
    if shape.gpus_per_node:
        most = slurm.gpus_per_node(partition)
        if most is not None and shape.gpus_per_node > most:
            problems.append(
                f"trainer.n_gpus_per_node={shape.gpus_per_node}, but the nodes of partition "
                f"'{partition or 'default'}' "
                f"have {most} GPUs; use at most that and more trainer.nnodes."
            )
    nodes = slurm.max_nodes_per_job(partition)
    if nodes is not None and shape.nodes > nodes:
        problems.append(
            f"{shape.nodes_key}={shape.nodes}, but a job of partition '{partition or 'default'}' "
            f"gets at most {nodes} "
            "nodes; use fewer, or another partition."
        )
    limit = slurm.partition_seconds(partition, "MaxTime")
    if limit is not None and options.timeout_min * 60 > limit:
        problems.append(
            f"hydra.launcher.timeout_min={options.timeout_min} is above the partition's MaxTime of "
            f"{limit // 60} min."
        )
    problems += derived_problems(shape, options) + argument_problems(shape, options)
    return problems + _image_problems(shape)


def derived_problems(shape: Shape, options: SlurmOptions) -> list[str]:
    """Sizes given a second time under ``hydra.launcher`` must agree with the config's own."""
    problems = []
    if options.gpus_per_task not in (None, 1 if shape.gpus_per_node else 0):
        problems.append(
            f"hydra.launcher.gpus_per_task={options.gpus_per_task}, but each task is a rank, which "
            "has one GPU; leave it out."
        )
    sizes = (
        ("nodes", shape.nodes_key, shape.nodes),
        ("tasks_per_node", "trainer.n_gpus_per_node", shape.ranks_per_node),
        ("gpus_per_node", "trainer.n_gpus_per_node", shape.gpus_per_node),
    )
    for name, key, value in sizes:
        option = getattr(options, name)
        if option not in (None, value):
            problems.append(
                f"hydra.launcher.{name}={option} contradicts {key}={value}; leave it out: it "
                "follows from each job's config."
            )
    return problems


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
    caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return expanded(caches, "set XDG_CACHE_HOME") / "plimsoll" / "digests.json"


def folder_problems(run: Path, local_folders: tuple[str, ...]) -> list[str]:
    """A run folder must be writable here and seen by all nodes."""
    for folder in local_folders:
        if Path(folder) in run.parents:
            return [
                f"the run folder {run} lies in {folder}, which every node has for itself; put "
                "hydra.sweep.dir (or trainer.default_local_dir) on a shared file system."
            ]
    existing = run
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        return [
            f"the run folder {run} cannot be written: {existing} is not a folder that you may "
            "write to."
        ]
    return []


def input_problems(config: Config) -> list[str]:
    """Files and folders that the config names and that do not exist, or hold no model."""
    model = config.actor_rollout_ref.model.path
    critic = None
    if config.uses_critic and config.critic.model.path != model:
        critic = config.critic.model.path
    template = config.data.chat_template
    named: dict[str, str | list[str] | None] = {
        "data.train_files": config.data.train_files,
        "data.val_files": config.data.val_files,
        "custom_reward_function.path": config.custom_reward_function.path,
        "actor_rollout_ref.rollout.agent.path": config.actor_rollout_ref.rollout.agent.path,
        "data.chat_template": None if is_template(template) else template,
        "actor_rollout_ref.model.path": _local_model(model),
        "critic.model.path": _local_model(critic),
    }
    problems = []
    for key, value in named.items():
        for text in [value] if isinstance(value, str) else value or []:
            path = os.path.expanduser(text)
            if not os.path.exists(path) and not glob.glob(path, recursive=True):
                problems.append(
                    f"{key}={text}: there is no {os.path.abspath(path)} on this machine."
                )
    models = {"actor_rollout_ref.model.path": model, "critic.model.path": critic}
    for key, named_model in models.items():
        if named_model and os.path.isdir(os.path.expanduser(named_model)):
            problems += _model_problems(os.path.expanduser(named_model), key)
    return problems


def _local_model(path: str | None) -> str | None:
    """``path`` where it begins like one; org/name is a model of the hub."""
    if path and path.startswith(("/", "./", "../", "~")):
        return path
    return None


@lru_cache(maxsize=64)  # the jobs of a sweep mostly share a model
def _model_problems(folder: str, key: str) -> tuple[str, ...]:
    """Why the folder holds no model that can be trained, which would show after the queue."""
    try:
        require_model(Path(folder), key)
    except UserError as error:
        return (str(error),)
    return ()


def save_seconds(config: Config, shape: Shape) -> float:
    """Predicted time of one checkpoint at the site's write bandwidth, s; 0 for a model that isn't
    on this machine, and for built-in ones, which are small.

    Raises UserError when the model's folder is no decoder's.
    """
    path = config.actor_rollout_ref.model.path
    folder = None if not path or path.startswith("builtin:") else folder_of(path)
    if folder is None:
        return 0.0
    size = run_checkpoint_bytes(config, ModelShape.from_folder(folder), critic_shape(config))
    return memory.predicted_save_s(size, bytes_per_s=shape.cluster.write_gb_s * 1e9)


@dataclass(frozen=True, kw_only=True)
class Grace:
    """What a preempted job gets before it is killed."""

    seconds: int
    source: str
    """Which setting it comes from, for messages."""


def grace_of(shape: Shape, options: SlurmOptions, slurm: Slurm) -> Grace | None:
    """The site profile's grace time, else the partition's GraceTime; None when there is neither."""
    if shape.cluster.grace_s is not None:
        return Grace(
            seconds=shape.cluster.grace_s, source=f"cluster.grace_s={shape.cluster.grace_s}"
        )
    grace_s = slurm.partition_seconds(options.partition or shape.cluster.partition, "GraceTime")
    if not grace_s:
        return None
    return Grace(seconds=grace_s, source=f"its partition's GraceTime of {grace_s} s")


def grace_problems(
    config: Config, shape: Shape, options: SlurmOptions, grace: Grace | None
) -> list[str]:
    """A checkpoint must fit between the warning and the end."""
    try:
        need = save_seconds(config, shape)
    except UserError as error:
        return [str(error)]
    problems = []
    if need > options.signal_delay_s:
        problems.append(
            f"a checkpoint is predicted to take {need:.0f} s "
            f"(cluster.write_gb_s={shape.cluster.write_gb_s}), but "
            f"hydra.launcher.signal_delay_s={options.signal_delay_s}; set it to "
            f"{int(need * config.trainer.checkpoint.save_margin) + 30} or more."
        )
    if grace is not None and need > grace.seconds:
        problems.append(
            f"a checkpoint is predicted to take {need:.0f} s, but this site kills a preempted job "
            "after "
            f"{grace.source}; use a partition with a longer GraceTime, or one whose jobs aren't "
            "preempted "
            "(cluster.partition, cluster.qos)."
        )
    return problems
