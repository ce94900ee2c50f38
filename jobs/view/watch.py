"""``wait=true``: a live table until every job has ended."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.live import Live

from jobs.evidence import states_of
from jobs.ledger import Entry
from jobs.rank_logs import tail_of
from jobs.run_state import COMPLETED, ENDED, UNKNOWN
from jobs.slurm import Slurm
from jobs.view.table import console_of, table_of
from trainer.base.errors import UserError

FIRST_POLL_S = 0.5
POLL_S = 5.0


def wait_for(entries: Sequence[Entry], slurm: Slurm, poll_s: float = POLL_S) -> int:
    """Wait until all runs have ended, then print the errors of failed ones. 1 when one failed.

    The jobs continue in Slurm when this process is interrupted.
    """
    pause = min(poll_s, FIRST_POLL_S)
    console = console_of()
    with Live(console=console, auto_refresh=False) as live:
        while True:
            try:
                states = states_of(entries, slurm)
            except UserError as error:  # Slurm is busy or away: the jobs are not
                sys.stderr.write(f"{error} Asking again.\n")
                time.sleep(poll_s)
                continue
            live.update(table_of(entries, states, console.width), refresh=True)
            if all(states[entry.run].state in (*ENDED, UNKNOWN) for entry in entries):
                break
            time.sleep(pause)
            pause = min(poll_s, pause * 1.3)
    failed = [entry for entry in entries if states[entry.run].state != COMPLETED]
    for entry in failed:
        state = states[entry.run]
        sys.stderr.write(
            f"{entry.name} {state.state}: {state.reason}\n{tail_of(Path(entry.run))}\n"
        )
    return 1 if failed else 0
