"""The ledger: one line per launch of a run, before and after sbatch: nothing submitted is ever
unknown.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from jobs.records import append_lines
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json_lines

PLANNED = "planned"
SUBMITTED = "submitted"
LOCAL = "local"
"""The job id of a run that the local launcher started."""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One run as it was launched."""

    name: str
    """``SWEEP/INDEX``, what the command line calls the run."""
    sweep: str
    run: str
    signature: str
    overrides: tuple[str, ...]
    shape: str
    gpus: int
    launch: str
    """One launch command; a resubmit is another launch."""
    phase: str = PLANNED
    job: str = ""
    """``ARRAY_INDEX`` of Slurm, or :data:`LOCAL`."""
    script: str = ""
    """The batch folder, from which a resubmit takes its script."""
    time: float = 0.0


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Append entries with one write."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    append_lines(path, [asdict(entry) for entry in entries])


def read(path: Path) -> list[Entry]:
    """The newest entry of every run, in the order of their first launch; empty without such a file.

    Raises UserError for a file that can't be read.
    """
    try:
        with path.open("rb"):
            pass
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"the ledger {path} can't be read ({error.strerror}); give another one with --ledger."
        ) from None
    newest: dict[str, Entry] = {}
    fields = set(Entry.__dataclass_fields__)
    for line in read_json_lines(path):
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in line.items() if k in fields
        }
        try:
            entry = Entry(**values)
        except TypeError:
            continue  # a line of another version
        newest[entry.run] = entry
    return list(newest.values())


def submitted(entry: Entry, job: str, now: float) -> Entry:
    """The entry once sbatch has answered."""
    return replace(entry, phase=SUBMITTED, job=job, time=now)
