"""The batch script of one array: sbatch parameters, and the shell lines around Submitit's command.
Pure.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

from jobs.submit.arguments import (
    clashes,
    mapped_parameters,
    sbatch_parameters,
    srun_problems,
    srun_words,
)
from jobs.submit.options import SlurmOptions
from jobs.submit.runtime import BatchPaths, rank_python, srun_flags
from jobs.submit.shape import Shape
from trainer.base.errors import UserError
from trainer.base.rank_info import ROLLOUT_NODES


@dataclass(frozen=True, kw_only=True)
class Script:
    """What Submitit's SlurmExecutor is given."""

    parameters: dict[str, Any]
    """Arguments of ``SlurmExecutor.update_parameters``, plain values. ``setup`` lacks the lines
    that set FOLDER and the launch: they differ in a resubmit, see ``executor.make_executor``.
    """
    python: str
    """Shell text that Submitit puts before ``-u -m submitit.core._submit``: srun, the runtime, the
    interpreter.
    """
    named: tuple[str, ...] = ()
    """Further variables of the submitting shell that pass to the jobs (``cluster.env``)."""


def script_of(
    shape: Shape,
    options: SlurmOptions,
    paths: BatchPaths,
    *,
    sweep: str,
    interpreter: str,
    environment: dict[str, str],
    image: Mapping[str, Any],
) -> Script:
    """The script of all jobs of one shape. ``interpreter``: this Python; ``environment``: further
    exports, no secrets; ``image``: as in ``job.json``, empty without one.
    """
    python = rank_python(shape, interpreter)
    flags = srun_flags(shape, paths)
    srun = [
        "srun",
        "--unbuffered",
        "--kill-on-bad-exit=1",
        "--wait=60",
        '--output="$LOGS/rank_%t.log"',
    ]
    srun += ["--open-mode=append", *_gpu_bind(shape), *flags]
    further = srun_words([*shape.cluster.srun_args, *(options.srun_args or [])])
    srun += [shlex.quote(word) for word in further]
    return Script(
        parameters=_parameters(shape, options, sweep)
        | {
            "setup": _setup(shape, options, python, flags, environment, image),
            "teardown": ["finish $?"],
            # our own srun: its log folder is the attempt's, known only to the script
            "use_srun": False,
        },
        python=" ".join([*srun, "bash", '"$FOLDER/task.sh"', shlex.quote(python)]),
        named=shape.cluster.env,
    )


def _setup(
    shape: Shape,
    options: SlurmOptions,
    python: str,
    flags: list[str],
    environment: dict[str, str],
    image: Mapping[str, Any],
) -> list[str]:
    task = 'bash "$FOLDER/task.sh"'
    if flags:
        task = " ".join(["srun --overlap --nodes=1 --ntasks=1", *flags, task])
    lines = [*_shell_lines("guard.sh"), f"PYTHON={shlex.quote(python)}"]
    lines += [f"export {ROLLOUT_NODES}={shape.rollout_nodes}"]
    lines += [f"export {name}={shlex.quote(value)}" for name, value in sorted(environment.items())]
    setup = [*shape.cluster.setup, *(options.setup or [])]
    if setup:
        lines += ["trap 'setup_failed $? $LINENO' ERR", *setup, "trap - ERR"]
    if "file" in image:
        names = {"IMAGE": "path", "IMAGE_DIGEST": "digest", "IMAGE_FILE": "file"}
        lines += [f"{name}={shlex.quote(str(image[key]))}" for name, key in names.items()]
    lines += [
        f'record() {{ {task} "$PYTHON" -m jobs.attempt "$@"; }}   # a short process, in the image '
        "if there is one"
    ]
    return [*lines, *_shell_lines("batch.sh")]


def _shell_lines(name: str) -> list[str]:
    return files("jobs.attempt").joinpath(name).read_text().rstrip().splitlines()


SBATCH_KEY = "cluster.sbatch_args"
PARAMETERS_KEY = "hydra.launcher.additional_parameters"


def argument_problems(shape: Shape, options: SlurmOptions) -> list[str]:
    """A message for each further argument of sbatch or srun that is none, or that contradicts what
    the plan sets.
    """
    problems: list[str] = []
    planned = planned_options(shape, options, sweep="")
    try:
        site = sbatch_parameters(shape.cluster.sbatch_args, SBATCH_KEY)
        problems += clashes(site, planned, SBATCH_KEY)
        given = mapped_parameters(options.additional_parameters, PARAMETERS_KEY)
        problems += clashes(given, planned, PARAMETERS_KEY)
    except UserError as error:
        problems.append(str(error))
    problems += srun_problems(shape.cluster.srun_args, "cluster.srun_args")
    return problems + srun_problems(options.srun_args or [], "hydra.launcher.srun_args")


def planned_options(shape: Shape, options: SlurmOptions, sweep: str) -> dict[str, Any]:
    """Long options of sbatch that follow from the config and the launcher's settings."""
    planned = _planned(shape, options, sweep)
    return {name.replace("_", "-"): value for name, value in planned.items()}


def _parameters(shape: Shape, options: SlurmOptions, sweep: str) -> dict[str, Any]:
    extra: dict[str, Any] = {"requeue": True, "export": "ALL"}
    extra |= sbatch_parameters(shape.cluster.sbatch_args, SBATCH_KEY)
    extra |= mapped_parameters(options.additional_parameters, PARAMETERS_KEY)
    return _planned(shape, options, sweep) | {
        "signal_delay_s": options.signal_delay_s,
        "array_parallelism": options.array_parallelism,
        "stderr_to_stdout": options.stderr_to_stdout,
        "additional_parameters": extra,
    }


def _planned(shape: Shape, options: SlurmOptions, sweep: str) -> dict[str, Any]:
    """The same by Submitit's names."""
    cluster = shape.cluster
    wanted: dict[str, Any] = {
        "job_name": options.name or sweep,
        "partition": options.partition or cluster.partition,
        "account": options.account or cluster.account,
        "qos": options.qos or cluster.qos,
        "time": options.timeout_min,
        "nodes": shape.nodes,
        "ntasks_per_node": shape.ranks_per_node,
        "cpus_per_task": options.cpus_per_task or cluster.cpus_per_task,
        "mem": _memory(options.mem_gb or cluster.mem_gb),
        "exclusive": True if options.exclusive else None,
    }
    for name in (
        "cpus_per_gpu",
        "gres",
        "mem_per_gpu",
        "mem_per_cpu",
        "comment",
        "constraint",
        "exclude",
        "nodelist",
        "dependency",
        "mail_type",
        "mail_user",
        "wckey",
    ):
        wanted[name] = getattr(options, name)
    wanted |= _gpus(shape) if options.gres is None else {}
    return {name: value for name, value in wanted.items() if value is not None}


def _gpus(shape: Shape) -> dict[str, Any]:
    """The GPU flag this site wants: a wrong style is refused, or binds one GPU per rank and breaks
    NCCL.
    """
    if not shape.gpus_per_node:
        return {}
    kind = f"{shape.cluster.gpu_type}:" if shape.cluster.gpu_type else ""
    if shape.cluster.gpu_style == "gres":
        return {"gres": f"gpu:{kind}{shape.gpus_per_node}"}
    if shape.cluster.gpu_style == "gpus-per-node":
        return {"gpus_per_node": f"{kind}{shape.gpus_per_node}"}
    return {"gpus_per_task": f"{kind}1"}


def _gpu_bind(shape: Shape) -> list[str]:
    """All ranks of a node see all its GPUs, so that they can open peer memory; the local rank picks
    one.

    Only needed where Slurm would bind: with gres and gpus-per-node it doesn't, and Slurm 22.05 then
    takes ``--gpu-bind=none`` to mean no CUDA_VISIBLE_DEVICES at all, which shows a rank other jobs'
    GPUs.
    """
    return (
        ["--gpu-bind=none"]
        if shape.gpus_per_node and shape.cluster.gpu_style == "gpus-per-task"
        else []
    )


def _memory(gigabytes: float | None) -> str | None:
    return None if gigabytes is None else f"{int(gigabytes * 1024)}MB"
