"""Whether a run is queued again after an attempt. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jobs.attempt.causes import (
    BAD_NODE,
    CANCELLED,
    CRASH,
    DONE,
    NODE_FAILURE,
    OUT_OF_MEMORY,
    PREEMPTED,
    REQUEUED,
    SIGNALLED,
    TIMEOUT,
    Cause,
)

BUDGET_OF = {
    PREEMPTED: "preempted",
    REQUEUED: "preempted",
    SIGNALLED: "preempted",
    TIMEOUT: "timeout",
    NODE_FAILURE: "node_failure",
    BAD_NODE: "bad_node",
    CRASH: "crash",
    OUT_OF_MEMORY: "crash",
}
"""The budget each cause draws on. A cause that is missing here is never queued again."""

FINAL = {DONE: "finished", CANCELLED: "cancelled"}
NODE = re.compile(r"[\w.-]+")


@dataclass(frozen=True, kw_only=True)
class Decision:
    """What the batch script does next."""

    requeue: bool
    cause: str
    why: str
    exclude: tuple[str, ...] = ()

    def line(self) -> str:
        """What the batch script reads: verdict, cause, nodes to avoid (``-`` for none). Three
        harmless words.
        """
        nodes = ",".join(node for node in self.exclude if NODE.fullmatch(node)) or "-"
        return f"{'requeue' if self.requeue else 'stop'} {self.cause} {nodes}"


def decide(
    cause: Cause,
    step: int,
    earlier: Sequence[Mapping[str, Any]],
    budgets: Mapping[str, int | None],
) -> Decision:
    """Queue again, or stop.

    ``step``: the newest step that this attempt logged. ``earlier``: the lines of the attempts
    before (``attempts.jsonl``). ``budgets``: how often each kind of end is queued again; None has
    no limit, and a kind that is missing is never queued again.
    """
    name = cause.name
    what = f"{name} ({cause.detail})" if cause.detail else name
    if name in FINAL:
        return Decision(requeue=False, cause=name, why=FINAL[name])
    budget = BUDGET_OF.get(name)
    if budget is None:
        return Decision(
            requeue=False, cause=name, why=f"{what}: running it again would end the same way"
        )
    drawn = [line for line in earlier if BUDGET_OF.get(str(line.get("cause"))) == budget]
    if budget == "crash" and any(line.get("step_to") == step for line in drawn):
        return Decision(
            requeue=False, cause=name, why=f"{what}: for the second time after step {step}"
        )
    limit = budgets.get(budget, 0)
    if limit is not None and len(drawn) >= limit:
        spent = f"the budget of {limit} for '{budget}' is used up"
        return Decision(requeue=False, cause=name, why=f"{what}: {spent}")
    of = "" if limit is None else f" of {limit}"
    nodes = [str(node) for line in earlier for node in line.get("bad_nodes", [])]
    return Decision(
        requeue=True,
        cause=name,
        why=f"{what}: queued again ({len(drawn) + 1}{of})",
        exclude=tuple(sorted({*nodes, *cause.nodes})),
    )


def budgets_from(options: Any) -> dict[str, int | None]:
    """Budgets by cause from launcher options; -1 means no limit."""
    limit = options.max_preemptions
    return {
        "preempted": None if limit < 0 else limit,
        "timeout": options.max_num_timeout,
        "node_failure": options.max_node_failures,
        "bad_node": options.max_bad_nodes,
        "crash": options.max_crashes,
    }
