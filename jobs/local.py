"""``hydra/launcher=local``: the jobs of a sweep one after another on this machine, from the same frozen configs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from jobs import ledger
from jobs.causes import DONE, ERROR, TIMEOUT, decide
from jobs.freeze import entry_of, freeze_run, new_launch
from jobs.ledger import Entry
from jobs.options import LocalOptions
from jobs.plan import Job, Plan
from jobs.records import append_line, attempts, last_attempt, log_folder, read_json
from jobs.snapshot import git_state
from trainer.errors import EXIT_OK, EXIT_REQUEUE


def run_locally(plan: Plan, options: LocalOptions, *, sweep: str, ledger_path: Path) -> int:
    """Run every job to its end; a failing one doesn't stop the others. Exit code 1 when one failed."""
    before = os.umask(0o077)
    failed: list[str] = []
    try:
        launch, git, now = new_launch(), git_state(), time.time()
        for job in plan.jobs:
            entry = entry_of(job, sweep=sweep, launch=launch, script="", now=now)
            record = {
                "name": entry.name, "sweep": entry.sweep, "launch": launch, "overrides": list(job.overrides),
                "signature": job.signature, "ranks": job.shape.ranks, "gpus": job.shape.gpus, "git": git,
                "limit_s": options.timeout_min * 60, "budgets": {"timeout": options.max_retries},
            }  # fmt: skip
            freeze_run(job, record)
            ledger.note(ledger_path, [ledger.submitted(entry, "local", time.time())])
            code = _run_job(job, entry, options)
            sys.stdout.write(f"{entry.name}: {'done' if code == 0 else f'failed with exit code {code}'} ({job.run})\n")
            sys.stdout.flush()
            if code != EXIT_OK:
                failed.append(f"{entry.name} ({' '.join(job.overrides)}):\n{tail_of(job.run)}")
    finally:
        os.umask(before)
    for text in failed:
        sys.stderr.write(f"{text}\n")
    return 1 if failed else 0


def _run_job(job: Job, entry: Entry, options: LocalOptions) -> int:
    for turn in range(options.max_retries + 1):
        number, started = last_attempt(job.run) + 1, time.time()
        log_folder(job.run, number).mkdir(parents=True, mode=0o700)
        code = _run_attempt(job, number, options.timeout_min * 60)
        cause = {EXIT_OK: DONE, EXIT_REQUEUE: TIMEOUT}.get(code, ERROR)
        earlier = [str(line["cause"]) for line in attempts(job.run) if line.get("launch") == entry.launch]
        why = decide(cause, earlier, {"timeout": options.max_retries}).why
        wall = time.time() - started
        line = {
            "attempt": number, "launch": entry.launch, "job": "local", "nodes": "localhost", "start": started,
            "end": time.time(), "wall_s": round(wall, 3), "gpu_s": round(wall * job.shape.gpus, 3), "cause": cause,
            "exit_code": code, "why": why, "step_to": read_json(job.run / "exit.json").get("step", 0), "bad_nodes": [],
        }  # fmt: skip
        append_line(job.run / "attempts.jsonl", line)
        if code != EXIT_REQUEUE or turn == options.max_retries:
            return code
    raise AssertionError("unreachable")


def _run_attempt(job: Job, number: int, limit_s: float) -> int:
    """One attempt; after ``limit_s`` it is asked to save (TERM) and killed a minute later."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}
    env |= {"PLIMSOLL_ATTEMPT": str(number), "WANDB_RUN_GROUP": job.run.parent.name}
    with (log_folder(job.run, number) / "rank_0.log").open("ab") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "jobs.local", str(job.run), str(job.shape.ranks)],
            env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT,
        )  # fmt: skip
        try:
            return process.wait(timeout=limit_s)
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                return process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                process.kill()
                return process.wait()
        except BaseException:
            process.terminate()
            process.wait(timeout=60)
            raise


def tail_of(run: Path, lines: int = 15) -> str:
    """The last lines of the newest attempt's logs: what a failed job said."""
    folder = log_folder(run, last_attempt(run))
    logs = sorted(folder.glob("rank_*.log"), key=lambda path: path.stat().st_size)
    for path in reversed(logs):
        text = path.read_text(errors="replace").strip().splitlines()
        if text:
            return "\n".join(f"  {line}" for line in text[-lines:])
    return f"  no log in {folder}"


def main(run: Path, ranks: int) -> int:
    """The process of one attempt: starts the ranks as ``python -m trainer`` does."""
    from trainer import launch
    from trainer.config import load_frozen

    return launch.run(load_frozen(run), run, ranks)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
