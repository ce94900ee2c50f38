"""``hydra/launcher=local``: the jobs of a sweep one after another on this machine, from the same
frozen configs.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.attempt.bookkeeping import close_attempt, last_step, saved_step
from jobs.attempt.causes import CANCELLED, DONE, Cause, cause_of
from jobs.attempt.decision import Decision, decide
from jobs.attempt.evidence import ShellEvidence, ending_seen
from jobs.environment import run_environment
from jobs.ownership import living_owners
from jobs.rank_logs import log_file, tail_of
from jobs.records import attempts
from jobs.submit.freeze import entry_of, freeze_run
from jobs.submit.names import display_names, free_sweep_name
from jobs.submit.options import LocalOptions
from jobs.submit.plan import Job, SweepPlan
from jobs.submit.report import varying_overrides
from jobs.submit.snapshot import git_state
from trainer.base import atomic, memory, run_owner
from trainer.base.errors import UserError
from trainer.base.processes import process_start
from trainer.base.run_folder import DISPLAY_NAME, last_attempt, log_folder
from trainer.base.run_owner import Owner, new_launch


def run_locally(plan: SweepPlan, options: LocalOptions, *, group: str, ledger_path: Path) -> int:
    """Run every job to its end; a failing one doesn't stop the others. 1 when one failed, else 0.

    ``group``: the sweep's name in W&B, and in the ledger unless other runs have it. Raises
    UserError for an image, in which only Slurm's jobs run, and for a run folder whose earlier
    launch lives.
    """
    _require_no_image(plan)
    varying = varying_overrides({job.index: job.overrides for job in plan.jobs})
    git = git_state()
    failures: list[str] = []
    umask = os.umask(0o077)
    owners: dict[Path, Owner] = {}
    try:
        with ledger.locked(ledger_path):
            entries, names = _claim(plan, group, ledger_path, owners)
        for job, entry in zip(plan.jobs, entries, strict=True):
            record = _record(job, entry, names[job.index], group, git, options)
            freeze_run(job, record)
            ledger.append(ledger_path, [ledger.submitted(entry, ledger.LOCAL, time.time())])
            log = log_file(job.run, last_attempt(job.run) + 1, 0)
            _print(f"{entry.name}: its log is {log}")
            last = _run_job(job, record, options)
            run_owner.release(job.run, owners[job.run])
            if last.cause == DONE:
                _print(f"{entry.name}: done")
                continue
            _print(f"{entry.name}: failed: {last.why}")
            overrides = " ".join(varying[job.index])
            failures.append(f"{entry.name} ({overrides}):\n{tail_of(job.run)}")
    finally:
        for run, owner in owners.items():
            run_owner.release(run, owner)
        os.umask(umask)
    for text in failures:
        sys.stderr.write(f"{text}\n")
    return 1 if failures else 0


def _claim(
    plan: SweepPlan, group: str, ledger_path: Path, owners: dict[Path, Owner]
) -> tuple[list[ledger.Entry], dict[int, str]]:
    """Claim all run folders for this process (``owners`` gets them), and note the jobs that wait
    in the ledger. Their entries, and their names in W&B by index.
    """
    launch = new_launch()
    now = time.time()
    sweep = free_sweep_name(group, plan.jobs, ledger.read(ledger_path))
    entries = [
        replace(entry_of(job, sweep=sweep, launch=launch, script="", now=now), job=ledger.LOCAL)
        for job in plan.jobs
    ]
    claims = {
        Path(entry.run): run_owner.new_owner(launch, run_owner.LOCAL, entry.name)
        for entry in entries
    }
    run_owner.claim(claims, living_owners)
    owners.update(claims)
    ledger.append(ledger_path, entries)
    return entries, display_names(plan.jobs, sweep)


def _record(
    job: Job,
    entry: ledger.Entry,
    display_name: str,
    group: str,
    git: Mapping[str, Any],
    options: LocalOptions,
) -> dict[str, Any]:
    """What ``job.json`` holds of a local run."""
    return {
        "name": entry.name,
        DISPLAY_NAME: display_name,
        "group": group,
        "sweep": entry.sweep,
        "launch": entry.launch,
        "overrides": list(job.overrides),
        "signature": job.signature,
        "ranks": job.shape.ranks,
        "tasks": job.shape.ranks,
        "gpus": job.shape.gpus,
        "git": git,
        "limit_s": options.timeout_min * 60,
        # Whatever else ends a run here would end it again: there is no other node.
        "budgets": {"timeout": options.max_retries, "preempted": options.max_retries},
        "image": {},
    }


def _require_no_image(plan: SweepPlan) -> None:
    for runtime in {job.shape.container.runtime for job in plan.jobs} - {"none"}:
        raise UserError(
            f"container.runtime={runtime}, but hydra/launcher=local runs jobs in this interpreter: "
            "set container=none, or hydra/launcher=slurm."
        )


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run_job(job: Job, plan: Mapping[str, Any], options: LocalOptions) -> Decision:
    """Run attempts until the run is not to go on. Returns the last decision."""
    decision = _run_recorded_attempt(job, plan, options)
    while decision.requeue:
        decision = _run_recorded_attempt(job, plan, options)
    return decision


def _run_recorded_attempt(job: Job, plan: Mapping[str, Any], options: LocalOptions) -> Decision:
    """Run one attempt and write its records, also when it is interrupted."""
    number = last_attempt(job.run) + 1
    log_folder(job.run, number).mkdir(parents=True, mode=0o700)
    started = {
        "attempt": number,
        "launch": plan["launch"],
        "job": "local",
        "nodes": socket.gethostname(),
        "pid": os.getpid(),
        "pid_start": process_start(os.getpid()),
        "start": time.time(),
        "oom_kills": memory.oom_kills(),
        "step": saved_step(job.run),
    }
    atomic.write_json(log_folder(job.run, number) / "begin.json", started)
    try:
        code = _run_attempt(job, number, options.timeout_min * 60, str(plan["group"]))
    except BaseException:
        _close(job, started, plan, Cause(name=CANCELLED), None)
        raise
    shell = ShellEvidence(exit_code=code if code >= 0 else 128 - code)
    cause = cause_of(ending_seen(job.run, started, plan, shell, time.time()))
    return _close(job, started, plan, cause, shell.exit_code)


def _close(
    job: Job,
    started: Mapping[str, Any],
    plan: Mapping[str, Any],
    cause: Cause,
    exit_code: int | None,
) -> Decision:
    """Write the attempt's line and return what follows."""
    earlier = [line for line in attempts(job.run) if line.get("launch") == plan["launch"]]
    decision = decide(cause, last_step(job.run), earlier, plan["budgets"])
    close_attempt(
        job.run,
        dict(started),
        dict(plan),
        cause=cause.name,
        exit_code=exit_code,
        ended=time.time(),
        why=decision.why,
        requeue=decision.requeue,
    )
    return decision


def _run_attempt(job: Job, number: int, limit_s: float, group: str) -> int:
    """One attempt; after ``limit_s`` it is asked to save (TERM) and killed a minute later."""
    env = run_environment(os.environ) | {
        "PLIMSOLL_ATTEMPT": str(number),
        "WANDB_RUN_GROUP": group,
    }
    # One rank is the process itself; several have logs of their own beside the launcher's.
    name = "rank_0.log" if job.shape.ranks == 1 else "launcher.log"
    with (log_folder(job.run, number) / name).open("ab") as log:
        process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "jobs.submit.local",
                str(job.run),
                str(job.shape.ranks),
                str(number),
            ],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            return process.wait(timeout=limit_s)
        except BaseException as error:  # the limit, or Ctrl-C: it saves, within a minute
            process.terminate()
            try:
                code = process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if isinstance(error, subprocess.TimeoutExpired):
                return code
            raise


def main(run: Path, ranks: int, attempt: int) -> int:
    """The process of one attempt: starts the ranks as ``python -m trainer`` does."""
    from trainer import launch
    from trainer.config import load_frozen

    return launch.run(load_frozen(run), run, ranks, attempt=attempt)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])))
