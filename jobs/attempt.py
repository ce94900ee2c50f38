"""The bookkeeping of one attempt, run by the batch script outside srun: ``python -m jobs.attempt begin|end RUN``.

``begin`` closes the record of an attempt that died with its batch script, opens the next one and prints its number, or
``stop`` when the budget for lost nodes is used up. ``end`` writes the attempt's line to ``attempts.jsonl`` and prints
a decision that the shell acts on: Slurm is never called from here, since this may run inside the image.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

from jobs.causes import BAD_NODE, NODE_FAILURE, Ending, cause_of, cause_of_lost, decide, parse_show_job
from jobs.records import append_line, attempts, last_attempt, log_folder, read_json, write_json


def begin(run: Path, *, job: str, nodes: str, restarts: int, sacct: str, now: float) -> str:
    """Open the next attempt; ``sacct`` is its output for this job, one ``State|ExitCode|NodeList|End`` per line."""
    plan = read_json(run / "job.json")
    last = last_attempt(run)
    if last and not any(line.get("attempt") == last for line in attempts(run)):
        _close_lost(run, last, sacct, now)
    causes = [str(line["cause"]) for line in _of_this_launch(run, plan)]
    if causes and causes[-1] == NODE_FAILURE:
        verdict = decide(NODE_FAILURE, causes[:-1], plan.get("budgets", {}))
        if not verdict.requeue:
            sys.stderr.write(f"plimsoll: {verdict.why}\n")
            return "stop"
    folder = log_folder(run, last + 1)
    folder.mkdir(parents=True, mode=0o700)
    started = {"attempt": last + 1, "job": job, "nodes": nodes, "restarts": restarts, "start": now}
    write_json(folder / "begin.json", started | {"step": _last_step(run)})
    return str(last + 1)


def end(run: Path, *, number: int, exit_code: int, scontrol: str, bad_node: str, now: float) -> str:
    """Close attempt ``number`` and return the decision's line.

    An attempt that is closed already was given up for lost: this is its batch script, come back from a node that was
    cut off, and it has no say any more.
    """
    plan = read_json(run / "job.json")
    if any(line.get("attempt") == number for line in attempts(run)):
        return "stop lost -"
    started = read_json(log_folder(run, number) / "begin.json")
    left = read_json(run / "exit.json")
    mine = left if left.get("attempt") == number or left.get("time", 0) >= started.get("start", now) else {}
    seen = Ending(
        exit_code=exit_code,
        asked_by=mine.get("cause") if mine.get("cause") in ("USR2", "TERM", "INT") else None,
        slurm=parse_show_job(scontrol),
        restarts=int(started.get("restarts", 0)),
        elapsed_s=now - float(started.get("start", now)),
        limit_s=float(plan.get("limit_s", "inf")),
        signal_delay_s=float(plan.get("signal_delay_s", 0)),
    )
    cause = cause_of(seen)
    earlier = [str(line["cause"]) for line in _of_this_launch(run, plan)]
    bad = [str(n) for line in _of_this_launch(run, plan) for n in line.get("bad_nodes", [])]
    bad_here = bad_node.split(",") if cause == BAD_NODE and bad_node else []
    verdict = decide(cause, earlier, plan.get("budgets", {}), [*bad, *bad_here])
    _write_line(run, started, plan, cause=cause, exit_code=exit_code, now=now, why=verdict.why, bad_nodes=bad_here)
    sys.stderr.write(f"plimsoll: attempt {number} ended: {verdict.why}\n")
    return verdict.line()


def _close_lost(run: Path, number: int, sacct: str, now: float) -> None:
    started = read_json(log_folder(run, number) / "begin.json")
    rows = [line.split("|") for line in sacct.splitlines() if line.count("|") >= 3]
    ended = [row for row in rows if row[0].split(" ")[0] not in ("RUNNING", "PENDING", "COMPLETING")]
    state, exit_code = (ended[-1][0], ended[-1][1]) if ended else ("NODE_FAIL", "0:0")
    cause = cause_of_lost(state, exit_code)
    plan = read_json(run / "job.json")
    why = f"{cause}: the batch script left no record (sacct: {state})"
    _write_line(run, started | {"attempt": number}, plan, cause=cause, exit_code=None, now=now, why=why, bad_nodes=[])


def _write_line(
    run: Path, started: dict[str, Any], plan: dict[str, Any], *, cause: str, exit_code: int | None, now: float,
    why: str, bad_nodes: list[str],
) -> None:  # fmt: skip
    wall = max(0.0, now - float(started.get("start", now)))
    line = {
        "attempt": started.get("attempt"), "launch": plan.get("launch"), "job": started.get("job"),
        "nodes": started.get("nodes"), "start": started.get("start"), "end": now, "wall_s": round(wall, 3),
        "gpu_s": round(wall * int(plan.get("gpus", 0)), 3), "step_from": started.get("step", 0),
        "step_to": _last_step(run), "cause": cause, "exit_code": exit_code, "why": why, "bad_nodes": bad_nodes,
    }  # fmt: skip
    append_line(run / "attempts.jsonl", line)


def _of_this_launch(run: Path, plan: dict[str, Any]) -> list[dict[str, Any]]:
    """Attempts since the last submit or resubmit: budgets count from there."""
    return [line for line in attempts(run) if line.get("launch") == plan.get("launch")]


def _last_step(run: Path) -> int:
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
    parser.add_argument("--evidence", default="", help="what scontrol (end) or sacct (begin) says about the job")
    parser.add_argument("--bad-node", default="")
    given = parser.parse_args(arguments)
    env = os.environ
    if given.what == "begin":
        answer = begin(
            given.run, job=env.get("PLIMSOLL_JOB", ""), nodes=env.get("SLURM_JOB_NODELIST", "localhost"),
            restarts=int(env.get("SLURM_RESTART_COUNT") or 0), sacct=given.evidence, now=time.time(),
        )  # fmt: skip
    else:
        answer = end(
            given.run, number=int(env.get("PLIMSOLL_ATTEMPT") or last_attempt(given.run)), exit_code=given.exit_code,
            scontrol=given.evidence, bad_node=given.bad_node, now=time.time(),
        )  # fmt: skip
    sys.stdout.write(answer + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
