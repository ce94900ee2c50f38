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

from jobs.attempt.causes import (
    BAD_NODE,
    NODE_FAILURE,
    PREEMPTED,
    Ending,
    cause_of,
    cause_of_lost,
    decide,
    parse_show_job,
)
from jobs.attempt.image import IMAGE_CHANGED, image_problem
from jobs.records import append_line, attempts, newest_write, note_refused
from jobs.slurm import seconds
from trainer.base import atomic, metrics_file
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.rank_info import LAUNCH
from trainer.base.rank_records import STOPPED, read_records
from trainer.base.run_folder import last_attempt, log_folder, read_json
from trainer.base.run_owner import describe, owner_of

STOP_REQUESTS = ("USR2", "TERM", "INT", "HUP", "TIME")
"""Causes of a rank's stop in its end record: a signal, or TIME when the job's end came near."""


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
        why = _close_lost(run, last, plan, sacct, now)
        if why:
            sys.stderr.write(f"plimsoll: {why}\n")
            return "stop"
    folder = log_folder(run, last + 1)
    folder.mkdir(parents=True, mode=0o700)
    started = {
        "attempt": last + 1,
        "launch": plan.get("launch"),
        "job": job,
        "nodes": nodes,
        "restarts": restarts,
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


def end(run: Path, *, number: int, exit_code: int, scontrol: str, bad_node: str, now: float) -> str:
    """Close attempt ``number`` and return the decision's line for the shell.

    An attempt that is closed already was given up as lost: its batch script is back from a node
    that was cut off, and its decision does not count any more.
    """
    plan = read_json(run / "job.json")
    if any(line.get("attempt") == number for line in attempts(run)):
        return "stop lost -"
    started = read_json(log_folder(run, number) / "begin.json")
    ending = _ending(run, number, started, plan, exit_code, scontrol, now)
    cause = cause_of(ending)
    previous = _attempts_of_launch(run, plan)
    bad_nodes = [str(node) for line in previous for node in line.get("bad_nodes", [])]
    bad_here = bad_node.split(",") if cause == BAD_NODE and bad_node else []
    decision = decide(
        cause,
        [str(line["cause"]) for line in previous],
        plan.get("budgets", {}),
        [*bad_nodes, *bad_here],
    )
    close_attempt(
        run,
        started,
        plan,
        cause=cause,
        exit_code=exit_code,
        ended=now,
        why=decision.why,
        requeue=decision.requeue,
        bad_nodes=bad_here,
    )
    sys.stderr.write(f"plimsoll: attempt {number} ended: {decision.why}\n")
    return decision.line()


def _ending(
    run: Path,
    number: int,
    started: dict[str, Any],
    plan: dict[str, Any],
    exit_code: int,
    scontrol: str,
    now: float,
) -> Ending:
    """What is known about an attempt's end: exit code, the trainer's note, Slurm, the clock."""
    start = float(started.get("start", now))
    ends = [record.end for record in read_records(log_folder(run, number)).values()]
    requested = next((end.stop for end in ends if end is not None and end.kind == STOPPED), None)
    slurm = parse_show_job(scontrol)
    # scontrol may have changed the limit since the job was submitted.
    limit_s = seconds(slurm.get("TimeLimit", "")) or plan.get("limit_s") or "inf"
    return Ending(
        exit_code=exit_code,
        stop_request=requested if requested in STOP_REQUESTS else None,
        slurm=slurm,
        started=start,
        restarts=int(started.get("restarts", 0)),
        elapsed_s=now - start,
        limit_s=float(limit_s),
        signal_delay_s=float(plan.get("signal_delay_s", 0)),
    )


def _close_lost(run: Path, number: int, plan: dict[str, Any], sacct: str, now: float) -> str:
    """Close an attempt that died with its batch script.

    Returns why the run must stop, or an empty text when it may go on.
    """
    begin_record = read_json(log_folder(run, number) / "begin.json")
    started = {"attempt": number, "launch": plan.get("launch")} | begin_record
    began = float(started.get("start") or now)
    state, exit_code, ended = _last_ended(sacct, began)
    if ended is None:
        ended = newest_write(run, number)
    cause = cause_of_lost(state, exit_code)
    previous = [str(line["cause"]) for line in _attempts_of_launch(run, started)]
    decision = decide(cause, previous, plan.get("budgets", {}))
    # With another cause an operator queued it again; with another launch a resubmit has given new
    # budgets since.
    draws_on_budget = cause in (NODE_FAILURE, PREEMPTED)
    same_launch = started["launch"] == plan.get("launch")
    stop = draws_on_budget and same_launch and not decision.requeue
    close_attempt(
        run,
        started,
        plan,
        cause=cause,
        exit_code=None,
        ended=max(began, min(now, ended)),
        requeue=not stop,
        why=f"{decision.why if stop else cause}: the batch script left no record (sacct: {state})",
    )
    return decision.why if stop else ""


def _last_ended(sacct: str, began: float) -> tuple[str, str, float | None]:
    """State, exit code and end of the newest ended row (``State|ExitCode|NodeList|End``) since
    ``began``; those of a lost node when there is none.
    """
    newest: tuple[str, str, float | None] = ("NODE_FAIL", "0:0", None)
    for line in sacct.splitlines():
        state, *rest = line.split("|")
        if len(rest) < 3 or state.split(" ")[0] in ("RUNNING", "PENDING", "COMPLETING"):
            continue
        ended = float(rest[2]) if rest[2].isdigit() else None
        if ended is None or ended >= began - 1:  # Slurm's clock has whole seconds
            newest = (state, rest[0], ended)
    return newest


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
    parser.add_argument("--bad-node", default="")
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
            number=int(env.get("PLIMSOLL_ATTEMPT") or last_attempt(options.run)),
            exit_code=options.exit_code,
            scontrol=options.evidence,
            bad_node=options.bad_node,
            now=time.time(),
        )
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
