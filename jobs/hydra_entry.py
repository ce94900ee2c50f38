"""Between Hydra and the planner: compose every job of a sweep now, at submit."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from jobs import ledger
from jobs.environment import notices
from jobs.ownership import living_owners
from jobs.progress import Progress
from jobs.slurm import Slurm
from jobs.submit import report
from jobs.submit.compose import compose_points, message_of
from jobs.submit.launch import Point, jobs_of, previous_runs
from jobs.submit.local import run_locally
from jobs.submit.names import free_sweep_name
from jobs.submit.options import LauncherOptions, SlurmOptions, local_options, slurm_options
from jobs.submit.plan import SweepPlan, make_plan
from jobs.submit.preflight import problems_of
from jobs.submit.script import planned_options
from jobs.submit.submit import Submission, scripts, submit, test_only
from trainer.base import command, run_owner
from trainer.base.errors import UserError
from trainer.launch import rollout_nodes


def launch(
    kind: str,
    settings: Mapping[str, Any],
    config: DictConfig,
    context: HydraContext,
    job_overrides: Sequence[Sequence[str]],
    first: int,
) -> list[JobReturn]:
    """Plan and start the jobs of a sweep. Wrong input is one message on stderr and exit code 2,
    before any sbatch.
    """
    command.restore_full_error()
    try:
        plain_settings = {key: _plain(value) for key, value in settings.items()}
        with Progress("composed", len(job_overrides)) as progress:
            points = compose_points(config, context, job_overrides, first, progress)
        sweep_dir = _sweep_dir(config)
        start = launch_on_slurm if kind == "slurm" else launch_here
        code = start(points, plain_settings, sweep_dir)
    except Exception as error:  # not to Hydra, which would take it for one of its own
        raise SystemExit(command.report(error)) from None
    if code:
        raise SystemExit(code)
    done = JobReturn()
    done.status = JobStatus.COMPLETED
    done.return_value = None
    return [done for _ in job_overrides]


def _sweep_dir(config: DictConfig) -> Path:
    """The folder of the sweep. Raises UserError for one that can't be resolved."""
    try:
        return Path(str(config.hydra.sweep.dir)).absolute()
    except OmegaConfBaseException as error:
        raise UserError(f"hydra.sweep.dir can't be resolved: {message_of(error)}") from error


def _plain(value: Any) -> Any:
    """A value of a config without OmegaConf's containers."""
    return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value


def _planned(
    points: Sequence[Point],
    options: LauncherOptions,
    sweep_dir: Path,
    slurm: Slurm | None,
    size: int,
) -> SweepPlan:
    with Progress("checked", len(points)) as progress:
        jobs = jobs_of(points, sweep_dir, progress)
    known = previous_runs(Path(options.ledger), slurm, {job.signature for job in jobs})
    return make_plan(jobs, max_array_size=size, resubmit=options.resubmit, previous=known)


def launch_on_slurm(points: Sequence[Point], settings: Mapping[str, Any], sweep_dir: Path) -> int:
    """Plan, check and submit; returns the exit code.

    Raises one UserError with everything that is wrong, before any sbatch.
    """
    options = slurm_options(settings)
    slurm = Slurm()
    slurm.require(answering=not options.dry_run)
    size = options.max_array_size or slurm.max_array_size()
    plan = _planned(points, options, sweep_dir, slurm, size)
    group = options.sweep or sweep_dir.name
    submission = Submission(
        sweep=free_sweep_name(group, plan.jobs, ledger.read(Path(options.ledger))),
        group=group,
        sweep_dir=sweep_dir,
        options=options,
        ledger=Path(options.ledger).absolute(),
        python=sys.executable,
    )
    problems = problems_of(plan, options, slurm)
    problems += run_owner.refusals([job.run for job in plan.jobs], living_owners)
    if problems:
        raise UserError("\n".join(problems))
    _print(report.plan_text(plan, options.timeout_min, submission.sweep))
    for line in unused_environment(plan, options, submission.sweep):
        _print(f"  {line}")
    if options.dry_run:
        _print(report.scripts_text(scripts(plan, submission)))
        return 0
    if options.check:
        for batch, answer in test_only(plan, submission, slurm):
            _print(f"{batch.name}: {answer}")
        return 0
    return _submit(plan, submission, slurm) if plan.jobs else 0


def _submit(plan: SweepPlan, submission: Submission, slurm: Slurm) -> int:
    """Submit, and wait where that is asked for; returns the exit code. Ctrl-C says how to look
    after what goes on in Slurm.
    """
    try:
        entries = submit(plan, submission)
        _print(report.submitted_text(entries))
        if submission.options.wait:
            from jobs.view.watch import wait_for

            return wait_for(entries, slurm)
    except KeyboardInterrupt:
        _print(report.interrupted_text(submission.sweep, submission.ledger))
        return command.EXIT_INTERRUPTED
    return 0


def unused_environment(plan: SweepPlan, options: SlurmOptions, sweep: str) -> list[str]:
    """What of this shell's variables the jobs of ``plan`` don't follow, one line each."""
    shapes = list(dict.fromkeys(batch.shape for batch in plan.batches))
    if not shapes:
        return []
    each = [planned_options(shape, options, sweep) for shape in shapes]
    shared = {k: v for k, v in each[0].items() if all(one.get(k) == v for one in each)}
    return notices(os.environ, shapes[0].cluster.env, shared)


def launch_here(points: Sequence[Point], settings: Mapping[str, Any], sweep_dir: Path) -> int:
    """Plan, check and run on this machine; returns the exit code. Raises UserError."""
    options = local_options(settings)
    plan = _planned(points, options, sweep_dir, None, len(points))
    for job in plan.jobs:
        rollout_nodes.require(job.checked)
    group = options.sweep or sweep_dir.name
    sweep = free_sweep_name(group, plan.jobs, ledger.read(Path(options.ledger)))
    _print(report.plan_text(plan, options.timeout_min, sweep))
    if options.dry_run:
        return 0
    return run_locally(plan, options, group=group, ledger_path=Path(options.ledger).absolute())


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
