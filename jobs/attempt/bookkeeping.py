"""The bookkeeping of one attempt, run by the batch script outside srun: ``python -m jobs.attempt
begin|end RUN``.

``begin`` closes the record of an attempt that died with its batch script, opens the next one and
prints its number, or ``stop`` when that attempt's budget is used up. ``end`` writes the attempt's
line to ``attempts.jsonl`` and prints a decision that the shell acts on: Slurm is never called from
here, since this may run inside the image.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jobs.attempt.causes import CRASH, DONE, ERROR, NODE_FAILURE, OUT_OF_MEMORY, PREEMPTED, cause_of
from jobs.attempt.decision import decide
from jobs.attempt.evidence import ShellEvidence, ending_lost, ending_seen, last_ended_row
from jobs.attempt.image import IMAGE_CHANGED, image_problem
from jobs.records import append_line, attempts, newest_write, note_refused
from trainer.base import atomic, memory, metrics_file
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.rank_info import LAUNCH
from trainer.base.run_folder import last_attempt, log_folder, read_json
from trainer.base.run_owner import describe, owner_of

FINAL_BY_RECORD = (DONE, ERROR)
DRAWS_ON_BUDGET = (NODE_FAILURE, PREEMPTED, CRASH, OUT_OF_MEMORY)
"""Causes after which Slurm queues a job again by itself. After any other an operator did it, whose
word counts.
"""


def begin(
    run: Path,
    *,
    job: str,
    nodes: str,
    restarts: int,
    sacct: str,
    now: float,
    launch: str | None = None,
    image: str = "",
) -> str:
    """Open the next attempt; ``sacct`` is its output for this job, one
    ``State|ExitCode|NodeList|End`` per line.

    Returns its number, ``done`` when an earlier one has finished the run, or ``stop``.

    ``image``: the image's digest where it is not the file that it was at submit. ``launch``: the
    one that this job belongs to. When another one owns the run folder, nothing of
    it is touched but the note why this job stops.
    """
    owner = owner_of(run)
    if launch and owner is not None and owner.launch != launch:
        why = f"this job's launch {launch} doesn't own {run} any more: {describe(owner)} does"
        note_refused(run, launch, why)
        sys.stderr.write(f"plimsoll: {why}\n")
        return "stop"
    plan = read_json(run / "job.json")
    last = last_attempt(run)
    is_open = not any(line.get("attempt") == last for line in attempts(run))
    if last and is_open:
        verdict = _close_lost(run, last, plan, sacct, now)
        if verdict:
            return verdict
    folder = log_folder(run, last + 1)
    folder.mkdir(parents=True, mode=0o700)
    started = {
        "attempt": last + 1,
        "launch": plan.get("launch"),
        "job": job,
        "nodes": nodes,
        "restarts": restarts,
        "oom_kills": memory.oom_kills(),
    }
    started |= {"start": now, "step": saved_step(run)}
    if image:
        started["image"] = image
    atomic.write_json(folder / "begin.json", started)
    problem = image_problem(plan, image)
    if problem:
        refuse(run, started, plan, cause=IMAGE_CHANGED, why=problem, now=now)
        return "stop"
    return str(last + 1)


def refuse(
    run: Path, started: dict[str, Any], plan: dict[str, Any], *, cause: str, why: str, now: float
) -> None:
    """Close an attempt before its ranks start; it would end the same way each time."""
    close_attempt(
        run, started, plan, cause=cause, exit_code=None, ended=now, why=why, requeue=False
    )
    log = log_folder(run, int(started["attempt"])) / "rank_0.log"
    log.write_text(f"Error: {why}\n")
    sys.stderr.write(f"plimsoll: {why}\n")


def end(run: Path, number: int, shell: ShellEvidence, now: float) -> str:
    """Close attempt ``number`` and return the decision's line for the shell.

    An attempt that is closed already was given up as lost: its batch script is back from a node
    that was cut off, and its decision does not count any more.
    """
    plan = read_json(run / "job.json")
    if any(line.get("attempt") == number for line in attempts(run)):
        return "stop lost -"
    started = {"attempt": number} | read_json(log_folder(run, number) / "begin.json")
    cause = cause_of(ending_seen(run, started, plan, shell, now))
    decision = decide(
        cause, last_step(run), _attempts_of_launch(run, plan), plan.get("budgets", {})
    )
    close_attempt(
        run,
        started,
        plan,
        cause=cause.name,
        exit_code=shell.exit_code,
        ended=now,
        why=decision.why,
        requeue=decision.requeue,
        bad_nodes=cause.nodes,
    )
    sys.stderr.write(f"plimsoll: attempt {number} ended: {decision.why}\n")
    return decision.line()


def _close_lost(run: Path, number: int, plan: dict[str, Any], sacct: str, now: float) -> str:
    """Close an attempt that died with its batch script.

    Returns an empty text when the run goes on, ``done`` when it has finished, ``stop`` when it must
    not go on.
    """
    begin_record = read_json(log_folder(run, number) / "begin.json")
    started = {"attempt": number, "launch": plan.get("launch")} | begin_record
    began = float(started.get("start") or now)
    state, ended = last_ended_row(sacct, began)
    if ended is None:
        ended = newest_write(run, number)
    ended = max(began, min(now, ended))
    cause = cause_of(ending_lost(run, started, plan, state, ended))
    earlier = _attempts_of_launch(run, started)
    decision = decide(cause, last_step(run), earlier, plan.get("budgets", {}))
    # With another launch a resubmit has given new budgets since.
    same_launch = started["launch"] == plan.get("launch")
    used_up = cause.name in DRAWS_ON_BUDGET and not decision.requeue
    stop = cause.name in FINAL_BY_RECORD or (same_launch and used_up)
    why = decision.why if stop else cause.name
    close_attempt(
        run,
        started,
        plan,
        cause=cause.name,
        exit_code=None,
        ended=ended,
        requeue=not stop,
        why=f"{why}: the batch script left no record (sacct: {state or 'nothing'})",
        bad_nodes=cause.nodes,
    )
    if not stop:
        return ""
    sys.stderr.write(f"plimsoll: {why}\n")
    return "done" if cause.name == DONE else "stop"


def close_attempt(
    run: Path,
    started: dict[str, Any],
    plan: dict[str, Any],
    *,
    cause: str,
    exit_code: int | None,
    ended: float,
    why: str,
    requeue: bool,
    bad_nodes: Sequence[str] = (),
) -> None:
    """Append the attempt's line to ``attempts.jsonl``, with the same fields for every cause and
    launcher.

    ``started`` is its ``begin.json``; ``requeue``: whether the job is queued again, by the batch
    script or by Slurm.
    """
    wall = max(0.0, ended - float(started.get("start", ended)))
    line = {
        "attempt": started.get("attempt"),
        "launch": started.get("launch", plan.get("launch")),
        "job": started.get("job"),
        "nodes": started.get("nodes"),
        "start": started.get("start"),
        "end": ended,
        "wall_s": round(wall, 3),
        "gpu_s": round(wall * int(plan.get("gpus", 0)), 3),
        "step_from": started.get("step", 0),
        "step_to": last_step(run),
        "cause": cause,
        "exit_code": exit_code,
        "why": why,
        "requeue": requeue,
        "bad_nodes": list(bad_nodes),
    }
    append_line(run / "attempts.jsonl", line)


def _attempts_of_launch(run: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Attempts since the last submit or resubmit: budgets count from there."""
    return [line for line in attempts(run) if line.get("launch") == plan.get("launch")]


def saved_step(run: Path) -> int:
    """The step that an attempt resumes from: of the newest committed checkpoint, or without one the
    newest that was logged.
    """
    manifests = (run / "checkpoints").glob("step_*/manifest.json")
    names = [path.parent.name.removeprefix("step_") for path in manifests]
    saved = [int(name) for name in names if name.isdigit()]
    return max(saved, default=0) or last_step(run)


def last_step(run: Path) -> int:
    """The newest step in ``metrics.jsonl``, or 0."""
    return metrics_file.last_step(run / METRICS_FILE) or 0


def main(arguments: list[str] | None = None) -> int:
    """Entry of the batch script."""
    parser = argparse.ArgumentParser(prog="python -m jobs.attempt", description=__doc__)
    parser.add_argument("action", choices=["begin", "end"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument(
        "--evidence", default="", help="what scontrol (end) or sacct (begin) says about the job"
    )
    parser.add_argument("--image", default="", help="the image's digest, where its file changed")
    parser.add_argument("--nodes", default="", help="states of the job's nodes, NODE STATE lines")
    parser.add_argument("--bad-node", default="", help="nodes that failed the node check")
    options = parser.parse_args(arguments)
    env = os.environ
    if options.action == "begin":
        answer = begin(
            options.run,
            job=env.get("PLIMSOLL_JOB", ""),
            nodes=env.get("SLURM_JOB_NODELIST", "localhost"),
            restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
            sacct=options.evidence,
            now=time.time(),
            launch=env.get(LAUNCH),
            image=options.image,
        )
    else:
        answer = end(
            options.run,
            int(env.get("PLIMSOLL_ATTEMPT") or last_attempt(options.run)),
            ShellEvidence(
                exit_code=options.exit_code,
                scontrol=options.evidence,
                nodes=options.nodes,
                bad_nodes=options.bad_node,
            ),
            time.time(),
        )
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
