"""Every row of (what the ranks recorded) x (what Slurm says) x (srun's exit code): the cause.

``golden/causes.txt`` holds the table, one line for each group of exit codes that give the same
cause, with the nodes to avoid in brackets. UPDATE_GOLDEN=1 writes it anew: read the difference.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from jobs.attempt.causes import Ending, cause_of
from trainer.base.rank_records import RankEnd, RankRecord

GOLDEN = Path(__file__).with_name("golden") / "causes.txt"
STARTED = 2000.0
NODES = ("n1", "n2")
CODES = (0, 1, 2, 77, 85, 134, 137, 139, 140, 143, 233)


def record(kind: str | None, rank: int, stop: str | None = None) -> RankRecord:
    """The record of ``rank``, which is on the node of its number; None: it left no end record."""
    host = NODES[rank]
    if kind is None:
        return RankRecord(host=host)
    code = {"finished": 0, "stopped": 85, "user_error": 2}.get(kind, 1)
    end = RankEnd(
        kind=kind, exit_code=code, host=host, time=2100.0 + rank, stop=stop, message="its words"
    )
    return RankRecord(host=host, end=end)


def both(one: str | None, other: str | None, stop: str | None = None) -> dict[int, RankRecord]:
    return {0: record(one, 0, stop), 1: record(other, 1, stop)}


RECORDS: dict[str, dict[int, RankRecord]] = {
    "both finished": both("finished", "finished"),
    "0 finished, 1 silent": both("finished", None),
    "0 silent, 1 finished": both(None, "finished"),
    "both stopped by USR2": both("stopped", "stopped", "USR2"),
    "0 stopped by TERM, 1 silent": both("stopped", None, "TERM"),
    "both stopped by INT": both("stopped", "stopped", "INT"),
    "both stopped by TIME": both("stopped", "stopped", "TIME"),
    "both user error": both("user_error", "user_error"),
    "0 lost peer, 1 user error": both("lost_peer", "user_error"),
    "0 crash, 1 lost peer": both("crash", "lost_peer"),
    "0 crash, 1 silent": both("crash", None),
    "0 lost peer, 1 silent": both("lost_peer", None),
    "0 lost peer after TERM, 1 silent": both("lost_peer", None, "TERM"),
    "0 silent, 1 lost peer": both(None, "lost_peer"),
    "both lost peer": both("lost_peer", "lost_peer"),
    "both silent": both(None, None),
    "0 silent, 1 never began": {0: record(None, 0)},
    "0 lost peer, 1 never began": {0: record("lost_peer", 0)},
    "none began": {},
}


def job(state: str = "RUNNING", **fields: str) -> dict[str, str]:
    return {"JobState": state, "PreemptTime": "None", "Restarts": "0", **fields}


SLURM: dict[str, dict[str, Any]] = {
    "running": {"slurm": job()},
    "no answer": {"slurm": {}},
    "running, n2 dead": {"slurm": job(), "dead_nodes": ["n2"]},
    "running, memory kill": {"slurm": job(), "memory_kill": True},
    "running, late": {"slurm": job(), "elapsed_s": 3500.0},
    "preempted": {"slurm": job(PreemptTime="2001")},
    "preempted before": {"slurm": job(PreemptTime="1000")},
    "queued again": {"slurm": job("COMPLETING", Restarts="1")},
    "queued again, n2 dead": {"slurm": job("PENDING", Restarts="1"), "dead_nodes": ["n2"]},
    "node fail": {"slurm": job("NODE_FAIL")},
    "out of memory": {"slurm": job("OUT_OF_MEMORY")},
    "ended": {"slurm": job("COMPLETING")},
    "ended, over the limit": {"slurm": job("COMPLETING"), "elapsed_s": 3600.0},
}
SACCT = ("PREEMPTED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "CANCELLED by 0")
SACCT += ("FAILED", "REQUEUED", "COMPLETED")


def rows() -> Iterator[tuple[str, str, Ending]]:
    """Every row: names of records and of Slurm's words, and the ending."""
    common: dict[str, Any] = {"tasks": 2, "nodes": NODES, "started": STARTED}
    limits = {"elapsed_s": 5.0, "limit_s": 3600.0, "signal_delay_s": 120.0}
    for (name, records), (words, given), code in product(RECORDS.items(), SLURM.items(), CODES):
        ending = {**common, **limits, **given, "records": records, "exit_code": code}
        yield name, words, Ending(**ending)
    for (name, records), state in product(RECORDS.items(), [*SACCT, None]):
        ending = {**common, **limits, "records": records, "exit_code": None, "accounting": state}
        yield name, f"batch script died, sacct {state}", Ending(**ending)


def table() -> str:
    lines: dict[str, dict[str, dict[str, list[str]]]] = {}
    for name, words, ending in rows():
        cause = cause_of(ending)
        text = cause.name
        if cause.nodes:
            text += f" [{','.join(cause.nodes)}]"
        codes = lines.setdefault(name, {}).setdefault(words, {}).setdefault(text, [])
        codes.append("" if ending.exit_code is None else str(ending.exit_code))
    text = ""
    for name, of_slurm in lines.items():
        text += f"{name}\n"
        for words, causes in of_slurm.items():
            parts = [f"{cause}: {' '.join(codes)}" for cause, codes in causes.items()]
            if len(parts) == 1:
                parts = list(causes)
            text += f"    {words:<40} {'; '.join(parts)}\n"
    return text


def test_every_row() -> None:
    text = table()
    if os.environ.get("UPDATE_GOLDEN") == "1":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()


def test_what_holds_in_every_row() -> None:
    for name, words, ending in rows():
        cause = cause_of(ending)
        row = f"{name}, {words}, {ending.exit_code}: {cause}"
        kinds = [end.kind for end in ending.ends.values()]
        finished = 0 in ending.ends and ending.ends[0].kind == "finished"
        assert (cause.name == "done") == finished, row
        assert (cause.name == "error") == ("user_error" in kinds and not finished), row
        assert set(cause.nodes) < set(NODES) or cause.name == "bad_node", row
