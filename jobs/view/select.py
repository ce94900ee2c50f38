"""Which runs of the ledger a command means: by name, folder, Slurm id or sweep."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from jobs.ledger import Entry
from trainer.base.errors import UserError, nearest


def select(entries: Sequence[Entry], words: Sequence[str]) -> list[Entry]:
    """Runs that any of ``words`` names (all when there is none): sweeps in the ledger's order, the
    runs of a sweep by their index.

    A word is ``SWEEP``, ``SWEEP/INDEX``, a run folder, ``ARRAY`` or ``ARRAY_INDEX``. Raises
    UserError for a word that names nothing.
    """
    first = {entry.sweep: number for number, entry in reversed(list(enumerate(entries)))}
    chosen = sorted(entries, key=lambda entry: (first[entry.sweep], _index(entry)))
    if words:
        hits = {word: {e.run for e in entries if is_named(e, word)} for word in words}
        for word, runs in hits.items():
            if not runs:
                known = [e.name for e in entries] + [e.sweep for e in entries]
                hint = nearest(word, known) or ";"
                raise UserError(
                    f"'{word}' names no run of the ledger{hint} see python -m jobs status."
                )
        wanted = set().union(*hits.values())
        chosen = [e for e in entries if e.run in wanted]
    return chosen


def _index(entry: Entry) -> int:
    index = entry.name.rpartition("/")[2]
    return int(index) if index.isdigit() else 0


def is_named(entry: Entry, word: str) -> bool:
    """Whether ``word`` is the run's name, sweep, job, array or folder."""
    if word in (entry.name, entry.sweep, entry.job, entry.job.split("_")[0]):
        return bool(word)
    return os.sep in word and Path(os.path.abspath(word)) == Path(entry.run)
