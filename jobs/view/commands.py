"""The commands of ``python -m jobs``, one function each."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jobs import ledger
from jobs.ledger import Entry
from jobs.records import note_cancelled
from jobs.slurm import Slurm
from jobs.submit.launch import states_of
from jobs.submit.plan import FAILED
from jobs.view.select import select
from jobs.view.state import STATES, RunState
from jobs.view.table import console_of, table_of
from trainer.base.errors import UserError, nearest
from trainer.base.run_folder import last_attempt


def _entries(given: Namespace) -> list[Entry]:
    entries = ledger.read(given.ledger)
    if not entries:
        what = (
            "holds no runs" if given.ledger.exists() else f"isn't there (looked from {Path.cwd()})"
        )
        raise UserError(
            f"the ledger {given.ledger} {what}; name another one with --ledger or PLIMSOLL_LEDGER."
        )
    return entries


def _chosen(given: Namespace, *, looking: bool = True) -> tuple[list[Entry], dict[str, RunState]]:
    """The runs that are meant and their states. ``looking``: when Slurm is away, what the folders
    say has to do.
    """
    entries = select(_entries(given), given.runs)
    if given.state is not None and given.state.upper() not in STATES:
        known = [state.lower() for state in STATES]
        hint = nearest(given.state.lower(), known) or ";"
        raise UserError(f"--state {given.state} is no state{hint} there are {', '.join(known)}.")
    try:
        states = states_of(entries, Slurm())
    except UserError as error:
        if not looking:
            raise
        sys.stderr.write(f"{error} Shown is what the run folders say.\n")
        states = states_of(entries, None)
    return select(entries, [], states=states, state=given.state), states


def status(given: Namespace) -> int:
    """A table, or one JSON line per run."""
    entries, states = _chosen(given)
    if given.follow:
        from jobs.view.watch import wait_for

        return wait_for(entries, Slurm())
    if given.json:
        for entry in entries:
            sys.stdout.write(json.dumps(asdict(entry) | asdict(states[entry.run])) + "\n")
        return 0
    console_of().print(table_of(entries, states))
    return 0


def logs(given: Namespace) -> int:
    """The log of one rank of one run."""
    from jobs.view.logs import follow, show

    entries, states = _chosen(given)
    if len(entries) != 1:
        raise UserError(
            f"logs shows one run, and this names {len(entries)}; give SWEEP/INDEX, e.g. "
            f"{entries[0].name}."
            if entries
            else "no run is in that state."
        )
    run, state = Path(entries[0].run), states[entries[0].run]
    if last_attempt(run) == 0:
        waits = "; waiting for its log" if given.follow else ""
        sys.stderr.write(
            f"{entries[0].name} is {state.state} "
            f"{f'({state.reason})' if state.reason else ''}{waits}\n"
        )
        if not given.follow:
            return 1
    if not given.follow:
        return show(run, given.attempt or last_attempt(run), given.rank, given.lines)

    def ended() -> bool:
        return states_of(entries, Slurm())[entries[0].run].state in ("COMPLETED", *FAILED)

    return follow(run, given.rank, given.lines, ended)


def cancel(given: Namespace) -> int:
    """scancel the live ones."""
    if not given.runs and not given.state:
        raise UserError(
            "cancel needs to know what: give runs or sweeps, or --state, e.g. --state pending."
        )
    entries, states = _chosen(given, looking=False)
    live = [
        e
        for e in entries
        if e.job not in ("", ledger.LOCAL) and states[e.run].state not in ("COMPLETED", *FAILED)
    ]
    for entry in entries:
        if entry not in live:
            where = "; press Ctrl-C where it runs" if states[entry.run].state == "RUNNING" else ""
            sys.stdout.write(f"left alone {entry.name}: {states[entry.run].state}{where}\n")
    if live:
        Slurm().cancel([entry.job for entry in live])
        for entry in live:
            note_cancelled(Path(entry.run), entry.launch)
    sys.stdout.write(f"cancelled {len(live)} run(s): {_names(live)}\n")
    return 0


def resubmit(given: Namespace) -> int:
    """Submit ended runs again, in their own folders."""
    from jobs.submit.resubmit import resubmit_runs

    if not given.runs and not given.state:
        raise UserError(
            "resubmit needs to know what: give runs or sweeps, or --state, e.g. --state failed."
        )
    entries, states = _chosen(given, looking=False)
    ended = [entry for entry in entries if states[entry.run].state in FAILED]
    left = [entry for entry in entries if entry not in ended]
    for entry in left:
        sys.stdout.write(f"left alone {entry.name}: {states[entry.run].state}\n")
    done = resubmit_runs(ended, given.ledger)
    sys.stdout.write(f"resubmitted {len(done)} run(s): {_names(done)}\n")
    return 0


def compare(given: Namespace) -> int:
    """Metrics side by side."""
    from jobs.view.compare import compare_table

    entries, _ = _chosen(given)
    console_of().print(compare_table(entries, given.metric, given.at))
    return 0


def sync(given: Namespace) -> int:
    """``wandb sync`` in attempt order."""
    from jobs.view.sync import sync_runs

    entries, _ = _chosen(given)
    return sync_runs([Path(entry.run) for entry in entries], dry_run=given.dry_run)


def doctor(given: Namespace) -> int:
    """Checks, one line each; 1 when one failed."""
    from jobs.view.doctor import examine

    results = examine(
        image=given.image,
        digest=given.digest,
        python=given.python,
        binds=given.bind,
        folder=given.folder,
    )
    for result in results:
        sys.stdout.write(f"{'ok  ' if result.ok else 'FAIL'} {result.what}: {result.found}\n")
    return 0 if all(result.ok for result in results) else 1


def _names(entries: Sequence[Entry]) -> str:
    return ", ".join(entry.name for entry in entries) or "none"
