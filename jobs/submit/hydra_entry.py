"""Between Hydra and the planner: compose every job of a sweep now, at submit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, filter_overrides
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from jobs.slurm import Slurm
from jobs.submit import report
from jobs.submit.launch import Point, earlier_runs, jobs_of
from jobs.submit.local import run_locally
from jobs.submit.options import Common, local_options, slurm_options
from jobs.submit.plan import Plan, make_plan
from jobs.submit.preflight import problems_of
from jobs.submit.submit import Submission, scripts, submit, test_only
from trainer.base.errors import EXIT_USER, UserError
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
    try:
        given = {
            k: OmegaConf.to_container(v, resolve=True) if OmegaConf.is_config(v) else v
            for k, v in settings.items()
        }
        points = [
            _compose(config, context, list(o), first + n) for n, o in enumerate(job_overrides)
        ]
        sweep_dir = Path(str(config.hydra.sweep.dir)).absolute()
        start = launch_on_slurm if kind == "slurm" else launch_here
        code = start(points, given, sweep_dir)
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")
        raise SystemExit(EXIT_USER) from None
    if code:
        raise SystemExit(code)
    done = JobReturn()
    done.status = JobStatus.COMPLETED
    done.return_value = None
    return [done for _ in job_overrides]


def _compose(config: DictConfig, context: HydraContext, overrides: list[str], index: int) -> Point:
    shown = tuple(filter_overrides(overrides))
    try:
        composed = context.config_loader.load_sweep_config(config, overrides)
        with open_dict(composed):
            composed.hydra.job.id = f"job_{index}"
            composed.hydra.job.num = index
            HydraConfig.instance().set_config(composed)
            del composed["hydra"]
        values = OmegaConf.to_container(composed, resolve=True)
    except OmegaConfBaseException as error:
        raise UserError(f"job {index} ({' '.join(shown)}): {str(error).splitlines()[0]}") from None
    finally:
        HydraConfig.instance().set_config(config)
    assert isinstance(values, dict)
    return Point(index=index, overrides=shown, config={str(k): v for k, v in values.items()})


def _planned(
    points: Sequence[Point], options: Common, sweep_dir: Path, slurm: Slurm | None, size: int
) -> Plan:
    jobs = jobs_of(points, sweep_dir)
    known = earlier_runs(Path(options.ledger), slurm, {job.signature for job in jobs})
    return make_plan(jobs, max_array_size=size, resubmit=options.resubmit, earlier=known)


def launch_on_slurm(points: Sequence[Point], given: Mapping[str, Any], sweep_dir: Path) -> int:
    """Plan, check and submit; the exit code. Raises UserError, before any sbatch, with everything
    that is wrong.
    """
    options = slurm_options(given)
    slurm = Slurm()
    slurm.require()
    size = options.max_array_size or slurm.max_array_size()
    plan = _planned(points, options, sweep_dir, slurm, size)
    to = Submission(
        sweep=options.sweep or sweep_dir.name,
        sweep_dir=sweep_dir,
        options=options,
        ledger=Path(options.ledger).absolute(),
        python=sys.executable,
    )
    problems = problems_of(plan, options, slurm)
    if problems:
        raise UserError("\n".join(problems))
    _say(report.plan_text(plan, options.timeout_min, to.sweep))
    if options.dry_run:
        _say(report.scripts_text(scripts(plan, to)))
        return 0
    if options.check:
        for batch, words in test_only(plan, to, slurm):
            _say(f"{batch.name}: {words}")
        return 0
    if not plan.jobs:
        return 0
    entries = submit(plan, to)
    _say(report.submitted_text(entries))
    if options.wait:
        from jobs.view.watch import wait_for

        return wait_for(entries, slurm)
    return 0


def launch_here(points: Sequence[Point], given: Mapping[str, Any], sweep_dir: Path) -> int:
    """Plan, check and run on this machine; the exit code."""
    options = local_options(given)
    plan = _planned(points, options, sweep_dir, None, len(points))
    for job in plan.jobs:
        rollout_nodes.require(job.checked)
    sweep = options.sweep or sweep_dir.name
    _say(report.plan_text(plan, options.timeout_min, sweep))
    return (
        0
        if options.dry_run
        else run_locally(plan, options, sweep=sweep, ledger_path=Path(options.ledger).absolute())
    )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
