"""The ledger: one line per launch of a run, before and after sbatch: nothing submitted is ever
unknown.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, asdict, dataclass, replace
from dataclasses import fields as dataclass_fields
from pathlib import Path
from typing import Any

from jobs.records import append_lines
from trainer.base import file_lock
from trainer.base.errors import UserError
from trainer.base.json_files import (
    Fields,
    is_count,
    is_number,
    is_path,
    is_text,
    is_texts,
    open_regular,
    read_lines,
)

PLANNED = "planned"
SUBMITTED = "submitted"
LOCK_WAIT_S = 600.0
"""A launch of thousands of runs holds the lock for minutes."""
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


FIELDS: Fields = {
    "name": is_text,
    "sweep": is_text,
    "run": is_path,
    "signature": is_text,
    "overrides": is_texts,
    "shape": is_text,
    "gpus": is_count,
    "launch": is_text,
    "phase": is_text,
    "job": is_text,
    "script": is_text,
    "time": is_number,
}
"""What the fields of a line have to hold; a line that doesn't is left out."""
REQUIRED = tuple(field.name for field in dataclass_fields(Entry) if field.default is MISSING)
"""A line without them was written by another version."""


def append(path: Path, entries: Iterable[Entry]) -> None:
    """Append entries with one write."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    append_lines(path, [asdict(entry) for entry in entries])


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep other launches from choosing names until this one has noted its own.

    Raises UserError when the ledger can't be written, or another launch takes too long.
    """
    with contextlib.ExitStack() as stack:
        try:
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            lock = path.with_name(f"{path.name}.lock")
            stack.enter_context(file_lock.locked(lock, LOCK_WAIT_S))
        except OSError as error:
            raise UserError(
                f"the ledger {path} can't be locked ({error.strerror or error}); wait for the "
                "other launch, or give another ledger with hydra.launcher.ledger."
            ) from error
        yield


def read(path: Path) -> list[Entry]:
    """The newest entry of every run, in the order of their first launch; empty without such a file.

    Raises UserError for a file that can't be read.
    """
    try:
        open_regular(path).close()
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"the ledger {path} can't be read ({error.strerror}); give another one with --ledger."
        ) from None
    newest: dict[str, Entry] = {}
    fields = {field.name for field in dataclass_fields(Entry)}
    for line in read_lines(path, FIELDS, REQUIRED):
        values: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in line.items() if k in fields
        }
        newest[values["run"]] = Entry(**values)
    return list(newest.values())


def submitted(entry: Entry, job: str, now: float) -> Entry:
    """The entry once sbatch has answered."""
    return replace(entry, phase=SUBMITTED, job=job, time=now)
