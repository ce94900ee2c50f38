"""Settings of the launchers, under ``hydra.launcher``.

The names of hydra-submitit-launcher keep working (timeout_min, partition, array_parallelism, ...);
what the resolved config of a job already says (nodes, GPUs, ranks) is derived from it and need not
be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from jobs.submit.option_checks import problem_of
from trainer.base.errors import UserError, nearest

RESUBMIT = ("never", "failed", "always")


@dataclass(kw_only=True)
class LauncherOptions:
    """Settings that both launchers have."""

    resubmit: str = "failed"
    """A run with the same config was launched before: ``never`` again, only when it ``failed`` (it
    resumes in its own folder), or ``always`` (a new folder).
    """
    dry_run: bool = False
    """Print the plan and the exact scripts, write and submit nothing."""
    ledger: str = "${oc.env:PLIMSOLL_LEDGER,runs/ledger.jsonl}"
    """The file in which every launch is noted; ``python -m jobs`` reads it."""
    sweep: str | None = None
    """Name of the sweep (also the W&B group). None: the name of the sweep folder."""


@dataclass(kw_only=True)
class LocalOptions(LauncherOptions):
    """``hydra/launcher=local``: the same payload as processes of this machine, one job after
    another.
    """

    _target_: str = "hydra_plugins.plimsoll_launcher.LocalLauncher"
    timeout_min: Any = 60
    """Time limit of one job, whole minutes. Not ``int``: Hydra would refuse Slurm's form of a time
    without saying what to type.
    """
    max_retries: int = 3
    """How often a job that saved and asked to be run again is started again."""


@dataclass(kw_only=True)
class SlurmOptions(LauncherOptions):
    """``hydra/launcher=slurm``."""

    _target_: str = "hydra_plugins.plimsoll_launcher.SlurmLauncher"
    wait: bool = False
    """Block until all jobs have ended, with a live table; exit code 1 when one failed."""
    check: bool = False
    """Ask ``sbatch --test-only`` about every script, and submit nothing."""
    submitit_folder: str | None = None
    """Where scripts and pickles go. None: ``.submitit`` in the sweep folder."""
    timeout_min: Any = 60
    """Time limit of one attempt, whole minutes."""
    signal_delay_s: int = 120
    """USR2 is sent this many seconds before the time limit."""
    max_num_timeout: int = 3
    """Requeues after the time limit."""
    max_preemptions: int = -1
    """Requeues after a preemption; -1: no limit."""
    max_node_failures: int = 3
    """Requeues after a lost node."""
    max_bad_nodes: int = 3
    """Requeues away from nodes that fail the health check."""
    max_crashes: int = 2
    """Requeues after a crash or a memory kill; one at the same step as before is never queued
    again.
    """
    array_parallelism: int = 256
    """Jobs of one array that run at the same time."""
    max_array_size: int | None = None
    """Slurm's MaxArraySize; None asks ``scontrol show config``."""
    name: str | None = None
    """Slurm's job name. None: the name of the sweep."""
    partition: str | None = None
    """Overrides the site profile, like the next ones."""
    account: str | None = None
    qos: str | None = None
    cpus_per_task: int | None = None
    mem_gb: float | None = None
    nodes: int | None = None
    """Derived from trainer.nnodes and actor_rollout_ref.rollout.nnodes; a different value here is
    an error.
    """
    gpus_per_node: int | None = None
    """Derived from trainer.n_gpus_per_node; a different value here is an error."""
    tasks_per_node: int | None = None
    """Derived from trainer.n_gpus_per_node; a different value here is an error."""
    gpus_per_task: int | None = None
    """Every task is a rank, and has one GPU; another value is an error."""
    cpus_per_gpu: int | None = None
    gres: str | None = None
    mem_per_gpu: str | None = None
    mem_per_cpu: str | None = None
    comment: str | None = None
    constraint: str | None = None
    exclude: str | None = None
    nodelist: str | None = None
    dependency: str | None = None
    exclusive: bool = False
    mail_type: str | None = None
    mail_user: str | None = None
    wckey: str = "plimsoll"
    stderr_to_stdout: bool = True
    setup: list[str] | None = None
    """Further shell lines at the start of the batch script."""
    srun_args: list[str] | None = None
    additional_parameters: dict[str, Any] = field(default_factory=dict)
    """Further sbatch parameters, e.g. ``{reservation: x}``."""


@dataclass(kw_only=True)
class GridOptions:
    """``hydra/sweeper=grid``: every combination of the values of a command line."""

    _target_: str = "hydra_plugins.plimsoll_launcher.GridSweeper"
    params: dict[str, str] | None = None
    """Further keys -> values to sweep over, as on the command line."""


Options = TypeVar("Options", bound=LauncherOptions)


def local_options(values: Mapping[str, Any]) -> LocalOptions:
    """Checked options from ``hydra.launcher``. Raises UserError for unknown keys and impossible
    values.
    """
    return _checked(LocalOptions, "local", values)


def _checked(kind: type[Options], name: str, values: Mapping[str, Any]) -> Options:
    known = {f.name for f in fields(kind)}
    for key in values:
        if key not in known:
            raise UserError(
                f"hydra.launcher.{key} is not a setting of the {name} "
                f"launcher{nearest(key, known) or '.'}"
            )
    options = kind(**values)
    if options.resubmit not in RESUBMIT:
        hint = nearest(str(options.resubmit), RESUBMIT) or "."
        raise UserError(
            f"hydra.launcher.resubmit={options.resubmit!r} is none of {', '.join(RESUBMIT)}{hint}"
        )
    problem = problem_of({f.name: getattr(options, f.name) for f in fields(kind)})
    if problem is not None:
        raise UserError(problem)
    return options


def slurm_options(values: Mapping[str, Any]) -> SlurmOptions:
    """Checked options from ``hydra.launcher``. Raises UserError for unknown keys and impossible
    numbers.
    """
    options = _checked(SlurmOptions, "slurm", values)
    if options.signal_delay_s >= options.timeout_min * 60:
        raise UserError(
            f"hydra.launcher.signal_delay_s={options.signal_delay_s} leaves nothing of "
            f"timeout_min={options.timeout_min} ({options.timeout_min * 60} s); use a delay below "
            "it."
        )
    return options
