"""Arrays on their way to sbatch, of a sweep or of a resubmit: their files, the ledger before and
after, and what is said when one of several is refused.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.ledger import Entry
from jobs.submit.script import Script
from trainer.base import atomic, run_owner
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json
from trainer.base.run_owner import Owner

SCRIPT_FILE = "batch.json"
"""Beside the script what it was made from: a resubmit makes its own from that."""


@dataclass(frozen=True, kw_only=True)
class SlurmArray:
    """One array with its script, ready for sbatch."""

    folder: Path
    """Scripts and pickles; ``runs.txt`` has the run folder of each task."""
    script: Script
    launch: str
    entries: tuple[Entry, ...]
    """The ledger's entries, one per task."""

    @property
    def name(self) -> str:
        """``000-1n2g``, as the plan calls it."""
        return self.folder.name.rpartition("-")[0]

    def executor(self) -> Any:
        """The Submitit executor that renders and submits the script."""
        from jobs.submit.executor import make_executor

        return make_executor(self.script, self.folder, self.launch)


def write_array(array: SlurmArray, files: Mapping[str, str]) -> None:
    """Write the files that the script reads (``files`` by name, and the list of run folders), and
    what a resubmit needs.
    """
    array.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    runs = "".join(f"{entry.run}\n" for entry in array.entries)
    for name, text in {"runs.txt": runs, **files}.items():
        (array.folder / name).write_text(text)
    atomic.write_json(array.folder / SCRIPT_FILE, asdict(array.script))


def read_script(folder: Path) -> Script | None:
    """What the script of an earlier array was made from; None when there is nothing."""
    values = read_json(folder / SCRIPT_FILE)
    try:
        return Script(**values)
    except TypeError:
        return None


def submit_arrays(
    arrays: Sequence[SlurmArray], owners: Mapping[Path, Owner], ledger_path: Path
) -> list[Entry]:
    """Submit ``arrays``, whose runs ``owners`` have claimed and the ledger knows as planned.

    Returns the ledger's entries. Raises UserError with sbatch's message for an array that it
    refuses: what was submitted before stays, and the folders of the rest are free again.
    """
    from jobs.submit.payload import Rank

    done: list[Entry] = []
    for number, array in enumerate(arrays):
        try:
            ids = array.executor().submit_runs([Rank(entry.run) for entry in array.entries])
        except BaseException as error:
            rest = [entry for other in arrays[number:] for entry in other.entries]
            for entry in rest:
                run_owner.release(Path(entry.run), owners[Path(entry.run)])
            if not isinstance(error, Exception):  # Ctrl-C
                sys.stderr.write(_submitted_before(done, rest) + "\n")
                raise
            # Submitit wraps sbatch's message in its own error.
            text = f"sbatch refused array {array.name}: {str(error).strip()}"
            raise UserError(f"{text}\n{_submitted_before(done, rest)}") from error
        now = time.time()
        submitted = [
            ledger.submitted(entry, job, now) for entry, job in zip(array.entries, ids, strict=True)
        ]
        for entry in submitted:
            run_owner.note_job(Path(entry.run), owners[Path(entry.run)], entry.job)
        ledger.append(ledger_path, submitted)
        done += submitted
    return done


def _submitted_before(done: Sequence[Entry], rest: Sequence[Entry]) -> str:
    """What goes on in Slurm, what doesn't, and what to type for either."""
    rest_names = _names(rest)
    again = (
        f"Not submitted: {rest_names}. When the cause is mended, type python -m jobs resubmit "
        f"{' '.join(entry.name for entry in rest[:3])}{' ...' if len(rest) > 3 else ''}"
    )
    if not done:
        return again
    arrays = ", ".join(sorted({entry.job.split("_")[0] for entry in done}, key=int))
    return (
        f"Submitted before it, and going on: {_names(done)} as Slurm array(s) {arrays}; python -m "
        f"jobs cancel {arrays.replace(',', '')} ends them. {again}"
    )


def _names(entries: Sequence[Entry]) -> str:
    """``s/0, s/1, s/2 and 5 more``."""
    shown = ", ".join(entry.name for entry in entries[:8])
    return shown + (f" and {len(entries) - 8} more" if len(entries) > 8 else "")
