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
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.attempt.bookkeeping import close_attempt, saved_step
from jobs.attempt.causes import CANCELLED, DONE, ERROR, TIMEOUT, decide
from jobs.records import attempts, process_start, write_json
from jobs.submit.freeze import entry_of, freeze_run, new_launch
from jobs.submit.options import LocalOptions
from jobs.submit.plan import Job, Plan
from jobs.submit.report import varying_overrides
from jobs.submit.snapshot import git_state
from jobs.view.logs import log_file, tail_of
from trainer.base.errors import EXIT_OK, EXIT_REQUEUE, UserError
from trainer.base.run_folder import last_attempt, log_folder


def run_locally(plan: Plan, options: LocalOptions, *, sweep: str, ledger_path: Path) -> int:
    """Run every job to its end; a failing one doesn't stop the others. Exit code 1 when one failed.
    Raises UserError for an image, which only Slurm's jobs run in.
    """
    _require_no_image(plan)
    before = os.umask(0o077)
    failed: list[str] = []
    varying = varying_overrides({job.index: job.overrides for job in plan.jobs})
    try:
        launch, git, now = new_launch(), git_state(), time.time()
        for job in plan.jobs:
            entry = entry_of(job, sweep=sweep, launch=launch, script="", now=now)
            record = {
                "name": entry.name,
                "sweep": entry.sweep,
                "launch": launch,
                "overrides": list(job.overrides),
                "signature": job.signature,
                "ranks": job.shape.ranks,
                "gpus": job.shape.gpus,
                "git": git,
                "limit_s": options.timeout_min * 60,
                "budgets": {"timeout": options.max_retries},
                "image": {},
            }
            freeze_run(job, record)
            ledger.note(ledger_path, [ledger.submitted(entry, "local", time.time())])
            _say(f"{entry.name}: its log is {log_file(job.run, last_attempt(job.run) + 1, 0)}")
            code = _run_job(job, record, options)
            _say(f"{entry.name}: {'done' if code == EXIT_OK else f'failed with exit code {code}'}")
            if code != EXIT_OK:
                failed.append(f"{entry.name} ({' '.join(varying[job.index])}):\n{tail_of(job.run)}")
    finally:
        os.umask(before)
    for text in failed:
        sys.stderr.write(f"{text}\n")
    return 1 if failed else 0


def _require_no_image(plan: Plan) -> None:
    for runtime in {job.shape.container.runtime for job in plan.jobs} - {"none"}:
        raise UserError(
            f"container.runtime={runtime}, but hydra/launcher=local runs jobs in this interpreter: "
            "set container=none, "
            "or hydra/launcher=slurm."
        )


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _run_job(job: Job, plan: Mapping[str, Any], options: LocalOptions) -> int:
    for turn in range(options.max_retries + 1):
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
            "step": saved_step(job.run),
        }
        write_json(log_folder(job.run, number) / "begin.json", started)
        code: int | None = None
        try:
            code = _run_attempt(job, number, options.timeout_min * 60)
        finally:
            cause = (
                CANCELLED
                if code is None
                else {EXIT_OK: DONE, EXIT_REQUEUE: TIMEOUT}.get(code, ERROR)
            )
            earlier = [
                str(line["cause"])
                for line in attempts(job.run)
                if line.get("launch") == plan["launch"]
            ]
            verdict = decide(cause, earlier, plan["budgets"])
            close_attempt(
                job.run,
                started,
                dict(plan),
                cause=cause,
                exit_code=code,
                ended=time.time(),
                why=verdict.why,
                requeue=verdict.requeue,
            )
        if code != EXIT_REQUEUE or turn == options.max_retries:
            return code
    raise AssertionError("unreachable")


def _run_attempt(job: Job, number: int, limit_s: float) -> int:
    """One attempt; after ``limit_s`` it is asked to save (TERM) and killed a minute later."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    env |= {"PLIMSOLL_ATTEMPT": str(number), "WANDB_RUN_GROUP": job.run.parent.name}
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
