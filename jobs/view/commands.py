"""The commands of ``python -m jobs``, one function each."""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from jobs import ledger
from jobs.evidence import require_folder, states_of
from jobs.ledger import Entry
from jobs.records import note_cancelled
from jobs.run_state import ENDED, FAILED, STATES, RunState
from jobs.slurm import Slurm
from jobs.view.found import find_runs
from jobs.view.table import console_of, table_of
from trainer.base.errors import UserError, nearest
from trainer.base.run_folder import last_attempt


def _selected(
    options: Namespace, *, may_be_stale: bool = True
) -> tuple[list[Entry], dict[str, RunState]]:
    """The runs that the options name, and their states.

    ``may_be_stale``: without an answer from Slurm, use what the run folders say.
    """
    entries = find_runs(options.ledger, options.runs)
    if options.state is not None and options.state.upper() not in STATES:
        known = [state.lower() for state in STATES]
        hint = nearest(options.state.lower(), known) or ";"
        raise UserError(f"--state {options.state} is no state{hint} there are {', '.join(known)}.")
    try:
        states = states_of(entries, Slurm())
    except UserError as error:
        if not may_be_stale:
            raise
        sys.stderr.write(f"{error} Shown is what the run folders say.\n")
        states = states_of(entries, None)
    if options.state is not None:
        wanted = options.state.upper()
        entries = [entry for entry in entries if states[entry.run].state == wanted]
    return entries, states


def status(options: Namespace) -> int:
    """A table, or one JSON line per run."""
    entries, states = _selected(options)
    if options.follow:
        from jobs.view.watch import wait_for

        return wait_for(entries, Slurm())
    if options.json:
        for entry in entries:
            sys.stdout.write(json.dumps(asdict(entry) | asdict(states[entry.run])) + "\n")
        return 0
    console = console_of()
    console.print(table_of(entries, states, console.width))
    return 0


def watch(options: Namespace) -> int:
    """Pages that are drawn anew."""
    from jobs.view.live import watch

    entries, _ = _selected(options)
    if not entries:
        raise UserError("no run is in that state.")
    return watch(entries, options)


def logs(options: Namespace) -> int:
    """Print the log of one rank of one run. Raises UserError unless exactly one run is named."""
    from jobs.view.logs import follow, show

    entries, states = _selected(options)
    if not entries:
        raise UserError("no run is in that state.")
    if len(entries) > 1:
        raise UserError(
            f"logs shows one run, and this names {len(entries)}; give SWEEP/INDEX, e.g. "
            f"{entries[0].name}."
        )
    require_folder(entries[0])
    run = Path(entries[0].run)
    state = states[entries[0].run]
    if last_attempt(run) == 0:
        reason = f"({state.reason})" if state.reason else ""
        waits = "; waiting for its log" if options.follow else ""
        sys.stderr.write(f"{entries[0].name} is {state.state} {reason}{waits}\n")
        if not options.follow:
            return 1
    if not options.follow:
        return show(run, options.attempt or last_attempt(run), options.rank, options.lines)

    def ended() -> bool:
        return states_of(entries, Slurm())[entries[0].run].state in ENDED

    return follow(run, options.rank, options.lines, ended)


def cancel(options: Namespace) -> int:
    """Cancel the runs that have not ended. Raises UserError when none is named."""
    if not options.runs and not options.state:
        raise UserError(
            "cancel needs to know what: give runs or sweeps, or --state, e.g. --state pending."
        )
    entries, states = _selected(options, may_be_stale=False)
    live = [
        entry
        for entry in entries
        if entry.job not in ("", ledger.LOCAL) and states[entry.run].state not in ENDED
    ]
    for entry in entries:
        if entry not in live:
            hint = "; press Ctrl-C where it runs" if states[entry.run].state == "RUNNING" else ""
            sys.stdout.write(f"left alone {entry.name}: {states[entry.run].state}{hint}\n")
    if live:
        Slurm().cancel([entry.job for entry in live])
        for entry in live:
            note_cancelled(Path(entry.run), entry.launch)
    sys.stdout.write(f"cancelled {len(live)} run(s): {_names(live)}\n")
    return 0


def resubmit(options: Namespace) -> int:
    """Submit ended runs again, in their own folders. Raises UserError when none is named."""
    from jobs.submit.resubmit import resubmit_runs

    if not options.runs and not options.state:
        raise UserError(
            "resubmit needs to know what: give runs or sweeps, or --state, e.g. --state failed."
        )
    entries, states = _selected(options, may_be_stale=False)
    ended = [entry for entry in entries if states[entry.run].state in FAILED]
    for entry in entries:
        if entry in ended:
            continue
        sys.stdout.write(f"left alone {entry.name}: {states[entry.run].state}\n")
    submitted = resubmit_runs(ended, options.ledger)
    sys.stdout.write(f"resubmitted {len(submitted)} run(s): {_names(submitted)}\n")
    return 0


def compare(options: Namespace) -> int:
    """Runs side by side: a table, or the files that were asked for."""
    from jobs.view import compare as view

    entries = _with_folder(_selected(options)[0])
    for sentence in view.shared_ids(entries):
        sys.stderr.write(sentence)
    comparison = view.compare(entries, options)
    if options.csv is not None:
        view.write(options.csv, view.csv_text(comparison))
    if options.json is not None:
        view.write(options.json, view.json_text(comparison))
    if options.plot is not None:
        from jobs.view.plot import plot

        plot(options.plot, comparison.rows, comparison.metrics, comparison.curves, options.axis)
    if options.csv is None and options.json is None:
        console = console_of()
        for table in view.tables(comparison, console.width):
            console.print(table)
    return 0


def sync(options: Namespace) -> int:
    """Send to W&B what its server lacks."""
    from jobs.view.sync import sync_runs

    entries = _with_folder(_selected(options)[0])
    return sync_runs([Path(entry.run) for entry in entries], dry_run=options.dry_run)


def doctor(options: Namespace) -> int:
    """Checks, one line each; 1 when one failed."""
    from jobs.view.doctor import examine

    results = examine(
        image=options.image,
        digest=options.digest,
        python=options.python,
        binds=options.bind,
        folder=options.folder,
    )
    for result in results:
        sys.stdout.write(f"{'ok  ' if result.ok else 'FAIL'} {result.check}: {result.detail}\n")
    return 0 if all(result.ok for result in results) else 1


def _with_folder(entries: Sequence[Entry]) -> list[Entry]:
    """The runs whose folder is there; the others are named on stderr. Raises UserError when all
    are gone.
    """
    there = [entry for entry in entries if Path(entry.run).is_dir()]
    if entries and not there:
        require_folder(entries[0])
    for entry in entries:
        if entry not in there:
            sys.stderr.write(f"left out {entry.name}: the run folder {entry.run} is gone\n")
    return there


def _names(entries: Sequence[Entry]) -> str:
    return ", ".join(entry.name for entry in entries) or "none"
