"""The options ``plan.*`` of ``python -m trainer.plan``: what a plan needs besides the settings of
the run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

from trainer.base.errors import UserError, nearest

LARGEST = 1e9
"""Largest value of an option, as of a setting."""


@dataclass(frozen=True, kw_only=True)
class PlanOptions:
    """Values of ``plan.*``; each field's metadata has its help text."""

    tp: int = field(default=1, metadata={"help": "tensor-parallel ranks"})
    pp: int = field(default=1, metadata={"help": "pipeline-parallel ranks"})
    ep: int = field(default=1, metadata={"help": "expert-parallel ranks"})
    cp: int | None = field(
        default=None, metadata={"help": "context-parallel ranks; follows Ulysses"}
    )
    concurrent: int = field(
        default=24, metadata={"help": "sequences of a micro-batch, for the budget"}
    )
    mean_prompt: float | None = field(
        default=None, metadata={"help": "tokens; measured from the data unless set"}
    )
    mean_response: float | None = field(
        default=None, metadata={"help": "tokens; measured from the data unless set"}
    )
    step_time_s: float | None = field(
        default=None, metadata={"help": "seconds of a step, for the GPU-hours"}
    )
    steps: int | None = field(
        default=None, metadata={"help": "steps of the run; follows the settings"}
    )
    gpu_gb: float | None = field(
        default=None, metadata={"help": "GB of memory of a GPU, to compare with"}
    )
    write_gb_s: float = field(
        default=1.0, metadata={"help": "GB/s that a checkpoint is written with"}
    )


def split_options(argv: Sequence[str]) -> tuple[PlanOptions, list[str]]:
    """The ``plan.KEY=VALUE`` arguments, and the others.

    Raises UserError with everything that is wrong.
    """
    known = {f.name: f for f in fields(PlanOptions)}
    values: dict[str, float | int] = {}
    rest: list[str] = []
    problems: list[str] = []
    for text in argv:
        if not text.startswith("plan."):
            rest.append(text)
            continue
        name, _, value = text[len("plan.") :].partition("=")
        if name not in known:
            problems.append(
                f"unknown key plan.{name}{nearest(name, known)}; known are {', '.join(known)}"
            )
            continue
        whole = "float" not in str(known[name].type)
        try:
            values[name] = int(value) if whole else float(value)
            if not 0 < values[name] <= LARGEST:
                raise ValueError
        except ValueError:
            problems.append(
                f"plan.{name}={value}: expected a {'whole ' if whole else ''}number above 0, at "
                f"most {LARGEST:g}"
            )
    if problems:
        raise UserError("\n".join(problems))
    return PlanOptions(**values), rest  # type: ignore[arg-type]
