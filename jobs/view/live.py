"""``python -m jobs watch``: one run as a page that is drawn anew, several as a table."""

from __future__ import annotations

import contextlib
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console, RenderableType
from rich.live import Live

from jobs.evidence import states_of
from jobs.ledger import Entry
from jobs.run_state import ENDED, FAILED, RunState
from jobs.slurm import Slurm
from jobs.view.run_page import page, read_record
from jobs.view.table import console_of, table_of
from trainer.base.errors import UserError

FRAME_S = 2.0
"""Time between two frames."""
STATE_S = 10.0
"""Time between two questions to Slurm."""


def watch(entries: Sequence[Entry], options: Namespace) -> int:
    """Draw until all runs have ended, or Ctrl-C. Without a terminal, or with ``--once``, one frame.

    0, or 1 when a run that was watched to its end failed.
    """
    console = console_of()
    states: Mapping[str, RunState] = _states(entries)
    if options.once or not console.is_terminal:
        console.print(_frame(entries, states, console))
        return 0
    with contextlib.suppress(KeyboardInterrupt):
        states = _draw(entries, states, console)
    return 1 if any(state.state in FAILED for state in states.values()) else 0


def _draw(
    entries: Sequence[Entry], states: Mapping[str, RunState], console: Console
) -> Mapping[str, RunState]:
    asked = time.monotonic()
    with Live(console=console, auto_refresh=False, screen=True) as live:
        while True:
            live.update(_frame(entries, states, console), refresh=True)
            if all(states[entry.run].state in ENDED for entry in entries):
                break
            time.sleep(FRAME_S)
            if time.monotonic() - asked >= STATE_S:
                states = _states(entries)
                asked = time.monotonic()
    console.print(_frame(entries, states, console))
    return states


def _frame(
    entries: Sequence[Entry], states: Mapping[str, RunState], console: Console
) -> RenderableType:
    if len(entries) > 1:
        return table_of(entries, states, console.width)
    (entry,) = entries
    return page(entry.name, states[entry.run], read_record(Path(entry.run)), console.width)


def _states(entries: Sequence[Entry]) -> dict[str, RunState]:
    """Without an answer from Slurm, what the run folders say."""
    try:
        return states_of(entries, Slurm())
    except UserError:
        return states_of(entries, None)
