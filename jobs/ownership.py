"""Whether the launches that own run folders live: Slurm's word for its jobs, the lease and the
process for runs of one machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from jobs.evidence import states_of
from jobs.ledger import SUBMITTED, Entry
from jobs.run_state import ENDED, ENDING, UNKNOWN, RunState
from jobs.slurm import Slurm
from trainer.base import run_owner
from trainer.base.errors import UserError
from trainer.base.run_owner import FIX, Owner


def living_owners(owners: Mapping[Path, Owner | None]) -> dict[Path, str]:
    """The run folders whose owner lives, with a text that says how. Slurm is asked once for all.

    Raises UserError when Slurm owns one of them and doesn't answer: nothing is taken on a guess.
    """
    jobs = {
        run: owner
        for run, owner in owners.items()
        if owner is not None and owner.kind == run_owner.SLURM and owner.job and not owner.ended
    }
    states = _states(jobs)
    lives: dict[Path, str] = {}
    for run, owner in owners.items():
        life = run_owner.process_life(run, owner)
        if life is None and run in jobs:
            life = _job_life(states[str(run)])
        if life is not None:
            lives[run] = life
    return lives


def _states(jobs: Mapping[Path, Owner]) -> dict[str, RunState]:
    try:
        return states_of([_entry(run, owner) for run, owner in jobs.items()], Slurm())
    except UserError as error:
        run, owner = next(iter(jobs.items()))
        raise UserError(
            f"the run folder {run} belongs to {run_owner.describe(owner)}, and whether that job "
            f"lives can't be told: {error} Try again when Slurm answers, {FIX}"
        ) from error


def _job_life(state: RunState) -> str | None:
    """How a job lives by its state; None when it has ended."""
    if state.state in ENDED:
        return None
    if state.state == UNKNOWN:
        return "there is no Slurm on this machine to ask whether it lives"
    if state.state == ENDING:
        return "it has left Slurm's queue, and how it ended is not known before a minute is over"
    return f"it is {state.state}"


def _entry(run: Path, owner: Owner) -> Entry:
    """The owner's job as the ledger has it; the ledger itself may be another one."""
    return Entry(
        name=owner.name,
        sweep=owner.name.rpartition("/")[0],
        run=str(run),
        signature="",
        overrides=(),
        shape="",
        gpus=0,
        launch=owner.launch,
        phase=SUBMITTED,
        job=owner.job,
        time=owner.since,
    )
