"""The config groups ``cluster`` (a Slurm site) and ``container`` (an image), checked."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import NoneType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from jobs.environment import CLIENT_OPTIONS, LOCATES_CLUSTER, RUN_VARIABLES, matches
from jobs.submit.arguments import sbatch_parameters
from jobs.submit.option_checks import require_no_secret
from trainer.base.errors import UserError, nearest

READ_BY = {
    "image": ("apptainer", "pyxis"),
    "binds": ("apptainer", "pyxis"),
    "digest": ("apptainer",),
    "args": ("apptainer",),
}
"""Key of a container -> the runtimes that read it."""
ABOVE_0 = ("max_gpus_per_node", "cpus_per_task", "mem_gb", "write_gb_s")
"""Numbers of a site that can't be 0."""
GPU_STYLES = ("gres", "gpus-per-node", "gpus-per-task", "none")
RUNTIMES = ("none", "apptainer", "pyxis")


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One Slurm site (config group ``cluster``)."""

    name: str = "default"
    """Shown in plans and recorded with every run."""
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    gpu_style: str = "gres"
    """How jobs of this site ask for GPUs: gres, gpus-per-node, gpus-per-task or none (CPU
    only).
    """
    gpu_type: str | None = None
    """Slurm's GPU type, e.g. ``h100``: ``--gres=gpu:h100:8``."""
    max_gpus_per_node: int | None = None
    """GPUs of a node; a job that asks for more is refused at submit. None: not checked here."""
    cpus_per_task: int | None = None
    """CPU cores of one rank."""
    mem_gb: float | None = None
    """Memory of one node's share of a job, GB. None: the site's default."""
    grace_s: int | None = None
    """The partition's GraceTime, s: what a preempted job gets before it is killed. None: the site
    doesn't preempt.
    """
    local_folders: tuple[str, ...] = ("/tmp", "/var/tmp", "/dev/shm")  # noqa: S108
    """Folders that every node has for itself: a run folder there is refused."""
    write_gb_s: float = 1.0
    """Bandwidth of the shared file system for one job, GB/s; predicts how long a checkpoint
    takes.
    """
    setup: tuple[str, ...] = ()
    """Shell lines at the start of the batch script (``module load ...``)."""
    sbatch_args: tuple[str, ...] = ()
    """Further arguments of sbatch in any of its forms, e.g. ``--reservation=x``, ``-C gpu``."""
    srun_args: tuple[str, ...] = ()
    """Further arguments of srun, e.g. ``--mpi=none``."""
    env: tuple[str, ...] = ()
    """Names of further environment variables of the submitting shell that reach the jobs, and
    their images.
    """
    check_gpus: bool = True
    """Health check: compare nvidia-smi with what the job was given. False for a cluster whose GPUs
    are fake.
    """
    min_free_disk_gb: float = 1.0
    """Health check: free space the node's /tmp and the run folder must have, GB."""
    min_shm_gb: float = 0.0
    """Health check: size of /dev/shm, GB."""
    min_gpu_free_gb: float = 0.0
    """Health check: memory that must be free on every GPU of the job, GB."""

    def __post_init__(self) -> None:
        if self.gpu_style not in GPU_STYLES:
            raise UserError(
                f"cluster.gpu_style={self.gpu_style!r} is not known; use {', '.join(GPU_STYLES)}."
            )
        for value in (self.partition, self.account, self.qos, self.gpu_type):
            if value is not None and not re.fullmatch(r"[\w.,:@+-]+", value):
                raise UserError(
                    f"cluster: {value!r} is not a Slurm name; use letters, digits, '_', '-', '.' "
                    "only."
                )
        sbatch_parameters(self.sbatch_args, "cluster.sbatch_args")
        for name in self.env:
            if not re.fullmatch(r"[A-Za-z_]\w*", name):
                raise UserError(f"cluster.env: {name!r} is no name of an environment variable.")
            if matches(name, (*CLIENT_OPTIONS, *RUN_VARIABLES)) and name not in LOCATES_CLUSTER:
                raise UserError(
                    f"cluster.env: {name} can't be passed: Slurm and the batch script set such "
                    "variables. Use cluster.sbatch_args or cluster.srun_args."
                )


@dataclass(frozen=True, kw_only=True)
class Container:
    """Where the ranks run (config group ``container``)."""

    runtime: str = "none"
    """none (this interpreter), apptainer, or pyxis."""
    image: str | None = None
    """Path of the .sif (apptainer) or the image name (pyxis)."""
    digest: str | None = None
    """``sha256:...`` the image must have (apptainer); None accepts and records what is there."""
    verify: bool = True
    """Each attempt checks that the image's file is what it was at submit, and is refused when it
    isn't. False: it runs what is there; begin.json has its digest.
    """
    python: str | None = None
    """The interpreter inside the image; None: ``python3`` in an image, this interpreter without
    one.
    """
    binds: tuple[str, ...] = ()
    """Further folders to bind, ``source[:target[:ro]]``. The config's own paths are bound
    already.
    """
    args: tuple[str, ...] = ()
    """Further arguments of ``apptainer exec``."""

    def __post_init__(self) -> None:
        if self.runtime not in RUNTIMES:
            hint = nearest(str(self.runtime), RUNTIMES) or "."
            raise UserError(
                f"container.runtime={self.runtime!r} is none of {', '.join(RUNTIMES)}{hint}"
            )
        if self.runtime != "none" and not self.image:
            raise UserError(
                f"container.runtime={self.runtime} needs an image: set container.image=PATH.sif."
            )
        if not self.verify and self.runtime == "none":
            raise UserError(
                "container.verify=false: container.runtime=none has no image; leave it out."
            )
        for key, runtimes in READ_BY.items():
            if getattr(self, key) and self.runtime not in runtimes:
                raise UserError(
                    f"container.{key} is not read with container.runtime={self.runtime}: set the "
                    "runtime to "
                    f"{' or '.join(runtimes)}, or leave {key} out."
                )


T = TypeVar("T", Cluster, Container)


def from_mapping(kind: type[T], values: Mapping[str, Any] | None) -> T:
    """A :class:`Cluster` or :class:`Container` from its config group. Raises UserError for an
    unknown key, and for a value of the wrong type or below what makes sense.
    """
    known = {field.name for field in fields(kind)}
    group = kind.__name__.lower()
    for key in values or {}:
        if key not in known:
            raise UserError(
                f"{group}.{key} is not a setting of a {group}{nearest(key, known) or '.'}"
            )
    hints = get_type_hints(kind)
    return kind(
        **{
            key: _checked(f"{group}.{key}", value, hints[key])
            for key, value in (values or {}).items()
        }
    )


def _checked(key: str, value: Any, hint: Any) -> Any:
    """``value`` as a field with the type ``hint`` holds it. Raises UserError."""
    require_no_secret(key, value)
    kinds = [kind for kind in get_args(hint) or (hint,) if kind is not NoneType]
    if get_origin(hint) is tuple:
        if not isinstance(value, list | tuple) or not all(isinstance(item, str) for item in value):
            raise UserError(f"{key}={value!r} must be a list of texts; write '{key}=[\"...\"]'.")
        return tuple(value)
    if value is None and NoneType in get_args(hint):
        return None
    if kinds == [str] and isinstance(value, int) and not isinstance(value, bool):
        value = str(value)  # an account's number
    if kinds == [str]:
        valid = isinstance(value, str) and value != ""
        expected = "a text"
    elif kinds == [bool]:
        valid = isinstance(value, bool)
        expected = "true or false"
    else:
        return _checked_number(key, value, whole=kinds == [int])
    if not valid:
        raise UserError(f"{key}={value!r} must be {expected}.")
    return value


def _checked_number(key: str, value: Any, *, whole: bool) -> Any:
    positive = key.rpartition(".")[2] in ABOVE_0
    number_type = int if whole else int | float
    valid = isinstance(value, number_type) and not isinstance(value, bool) and math.isfinite(value)
    if not valid or value < 0 or (positive and value == 0):
        kind = "whole number" if whole else "number"
        bound = "above 0" if positive else "of at least 0"
        raise UserError(f"{key}={value!r} must be a {kind} {bound}.")
    return value
