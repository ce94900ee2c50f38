"""The bookkeeping of one attempt, run by the batch script outside srun: ``python -m jobs.attempt
begin|end RUN``.

``begin`` closes the record of an attempt that died with its batch script, opens the next one and
prints its number, or ``stop`` when that attempt's budget is used up. ``end`` writes the attempt's
line to ``attempts.jsonl`` and prints a decision that the shell acts on: Slurm is never called from
here, since this may run inside the image.
"""

from __future__ import annotations

import argparse
import json
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
from jobs.records import append_line, attempts, newest_write, write_json
from jobs.slurm import seconds
from trainer.base.run_folder import last_attempt, log_folder, read_json

ASKED_BY = ("USR2", "TERM", "INT", "TIME")
"""What the trainer's ``exit.json`` may name: a signal, or the job's end time coming near."""


def begin(run: Path, *, job: str, nodes: str, restarts: int, sacct: str, now: float) -> str:
    """Open the next attempt; ``sacct`` is its output for this job, one
    ``State|ExitCode|NodeList|End`` per line.
    """
    plan = read_json(run / "job.json")
    last = last_attempt(run)
    if last and not any(line.get("attempt") == last for line in attempts(run)):
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
    write_json(folder / "begin.json", started | {"start": now, "step": saved_step(run)})
    return str(last + 1)


def end(run: Path, *, number: int, exit_code: int, scontrol: str, bad_node: str, now: float) -> str:
    """Close attempt ``number`` and return the decision's line.

    An attempt that is closed already was given up for lost: this is its batch script, come back
    from a node that was cut off, and it has no say any more.
    """
    plan = read_json(run / "job.json")
    if any(line.get("attempt") == number for line in attempts(run)):
        return "stop lost -"
    started = read_json(log_folder(run, number) / "begin.json")
    left = read_json(run / "exit.json")
    mine = (
        left
        if left.get("attempt") == number or left.get("time", 0) >= started.get("start", now)
        else {}
    )
    slurm = parse_show_job(scontrol)
    seen = Ending(
        exit_code=exit_code,
        asked_by=mine.get("cause") if mine.get("cause") in ASKED_BY else None,
        slurm=slurm,
        started=float(started.get("start", now)),
        restarts=int(started.get("restarts", 0)),
        elapsed_s=now - float(started.get("start", now)),
        limit_s=float(
            seconds(slurm.get("TimeLimit", "")) or plan.get("limit_s") or "inf"
        ),  # scontrol may change it
        signal_delay_s=float(plan.get("signal_delay_s", 0)),
    )
    cause = cause_of(seen)
    earlier = [str(line["cause"]) for line in _of_this_launch(run, plan)]
    bad = [str(n) for line in _of_this_launch(run, plan) for n in line.get("bad_nodes", [])]
    bad_here = bad_node.split(",") if cause == BAD_NODE and bad_node else []
    verdict = decide(cause, earlier, plan.get("budgets", {}), [*bad, *bad_here])
    close_attempt(
        run,
        started,
        plan,
        cause=cause,
        exit_code=exit_code,
        ended=now,
        why=verdict.why,
        requeue=verdict.requeue,
        bad_nodes=bad_here,
    )
    sys.stderr.write(f"plimsoll: attempt {number} ended: {verdict.why}\n")
    return verdict.line()


def _close_lost(run: Path, number: int, plan: dict[str, Any], sacct: str, now: float) -> str:
    """Write the line of an attempt that died with its batch script; why the run must stop, empty
    when it may go on.
    """
    started = {"attempt": number, "launch": plan.get("launch")} | read_json(
        log_folder(run, number) / "begin.json"
    )
    began = float(started.get("start") or now)
    state, exit_code, ended = _last_ended(sacct, began)
    if ended is None:  # the run's own files tell until when it lived
        ended = newest_write(run, number)
    cause = cause_of_lost(state, exit_code)
    earlier = [str(line["cause"]) for line in _of_this_launch(run, started)]
    verdict = decide(cause, earlier, plan.get("budgets", {}))
    # Other causes: an operator queued it again. Another launch: a resubmit has given new budgets
    # since.
    ours = cause in (NODE_FAILURE, PREEMPTED) and started["launch"] == plan.get("launch")
    stop = ours and not verdict.requeue
    close_attempt(
        run,
        started,
        plan,
        cause=cause,
        exit_code=None,
        ended=max(began, min(now, ended)),
        requeue=not stop,
        why=f"{verdict.why if stop else cause}: the batch script left no record (sacct: {state})",
    )
    return verdict.why if stop else ""


def _last_ended(sacct: str, began: float) -> tuple[str, str, float | None]:
    """State, exit code and end of the newest ended row (``State|ExitCode|NodeList|End``) that isn't
    older than ``began``; a lost node when there is none.
    """
    found: tuple[str, str, float | None] = ("NODE_FAIL", "0:0", None)
    for line in sacct.splitlines():
        state, *rest = line.split("|")
        if len(rest) < 3 or state.split(" ")[0] in ("RUNNING", "PENDING", "COMPLETING"):
            continue
        ended = float(rest[2]) if rest[2].isdigit() else None
        if ended is None or ended >= began - 1:  # Slurm's clock has whole seconds
            found = (state, rest[0], ended)
    return found


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
    """Append the attempt's line to ``attempts.jsonl``: the same fields whatever the cause and the
    launcher.

    ``started`` is its ``begin.json``; ``requeue``: the job is to be queued again, by us or by
    Slurm.
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


def _of_this_launch(run: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Attempts since the last submit or resubmit: budgets count from there."""
    return [line for line in attempts(run) if line.get("launch") == plan.get("launch")]


def saved_step(run: Path) -> int:
    """The step that an attempt goes on from: of the newest committed checkpoint, else the newest
    that was logged.
    """
    saved = [p.parent.name[5:] for p in (run / "checkpoints").glob("step_*/manifest.json")]
    return max((int(step) for step in saved if step.isdigit()), default=None) or last_step(run)


def last_step(run: Path) -> int:
    """The newest step that ``metrics.jsonl`` holds; only its last 64 KiB are read."""
    try:
        with (run / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 65536))
            tail = file.read().decode(errors="replace").splitlines()
    except OSError:
        return int(read_json(run / "exit.json").get("step") or 0)
    for line in reversed(tail):
        try:
            return int(json.loads(line)["step"])
        except (ValueError, KeyError, TypeError):
            continue
    return 0


def main(arguments: list[str] | None = None) -> int:
    """Entry of the batch script."""
    parser = argparse.ArgumentParser(prog="python -m jobs.attempt", description=__doc__)
    parser.add_argument("what", choices=["begin", "end"])
    parser.add_argument("run", type=Path)
    parser.add_argument("--exit-code", type=int, default=0)
    parser.add_argument(
        "--evidence", default="", help="what scontrol (end) or sacct (begin) says about the job"
    )
    parser.add_argument("--bad-node", default="")
    given = parser.parse_args(arguments)
    env = os.environ
    if given.what == "begin":
        answer = begin(
            given.run,
            job=env.get("PLIMSOLL_JOB", ""),
            nodes=env.get("SLURM_JOB_NODELIST", "localhost"),
            restarts=int(env.get("SLURM_RESTART_COUNT") or 0),
            sacct=given.evidence,
            now=time.time(),
        )
    else:
        answer = end(
            given.run,
            number=int(env.get("PLIMSOLL_ATTEMPT") or last_attempt(given.run)),
            exit_code=given.exit_code,
            scontrol=given.evidence,
            bad_node=given.bad_node,
            now=time.time(),
        )
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
