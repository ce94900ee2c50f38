"""Which launch owns a run folder: from its submission on, long before a rank takes the lease.

``owner.json`` names the launch. Whoever wants to write to the folder (submit, resubmit,
``python -m trainer``) claims it first: the record is compared and replaced under a short lock, so
that of two launches at once only one gets the folder. Whether the earlier owner still lives is
asked before, by a function of the caller. Standard library only: the batch script reads it too.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.file_lock import locked
from trainer.base.processes import process_start
from trainer.base.run_folder import read_json

FILE = "owner.json"
LOCK = ".owner.lock"
LEASE = "lease.json"
"""The file that rank 0 keeps locked while it trains (``trainer.checkpoint.store.lease``)."""
SLURM = "slurm"
LOCAL = "local"
LEASE_WAIT_S = 600.0
"""How long a process on another machine, which can't be seen from here, may take until rank 0 has
the lease; afterwards a free lease means that it has ended.
"""
LOCK_WAIT_S = 30.0
TRIES = 5
FIX = "or set another trainer.default_local_dir"


@dataclass(frozen=True, kw_only=True)
class Owner:
    """The launch that owns a run folder."""

    launch: str
    """A name of its own for every launch command."""
    kind: str
    """:data:`SLURM`: a job of Slurm; :data:`LOCAL`: the process below."""
    name: str = ""
    """What ``python -m jobs`` calls the run; empty for ``python -m trainer``."""
    job: str = ""
    """``ARRAY_INDEX`` of Slurm, once sbatch has answered."""
    host: str
    pid: int
    pid_start: int
    """The process that launched it, see :func:`process_start`."""
    since: float
    """Seconds since the epoch."""
    ended: float = 0.0
    """When the launch gave the folder back; 0.0 while it holds it."""


Lives = Callable[[Mapping[Path, Owner | None]], Mapping[Path, str]]
"""Of run folders and their owners those whose owner lives, with a text that says how. May raise
UserError when that can't be known.
"""


def new_launch() -> str:
    """A name for one launch command, unique in the ledger."""
    return uuid.uuid4().hex[:12]


def new_owner(launch: str, kind: str, name: str = "") -> Owner:
    """An owner that this process launches."""
    pid = os.getpid()
    return Owner(
        launch=launch,
        kind=kind,
        name=name,
        host=socket.gethostname(),
        pid=pid,
        pid_start=process_start(pid),
        since=time.time(),
    )


def owner_of(run: Path) -> Owner | None:
    """The owner of a run folder; None when it never had one, or its record makes no sense."""
    values = read_json(run / FILE)
    known = {key: values[key] for key in Owner.__dataclass_fields__ if key in values}
    try:
        return Owner(**known)
    except TypeError:
        return None


def claim(owners: Mapping[Path, Owner], lives: Lives) -> None:
    """Make ``owners`` the owners of their run folders, all or none.

    A folder that is missing is made, closed to other users (0700). Raises UserError that names
    every folder whose earlier owner lives, or that can't be written; nothing has changed then.
    """
    taken: dict[Path, Owner | None] = {}
    waiting = dict(owners)
    try:
        for _ in range(TRIES):
            before = {run: owner_of(run) for run in waiting}
            living = lives(before)
            if living:
                texts = [_refusal(run, before[run], life) for run, life in living.items()]
                raise UserError("\n".join(texts))
            for run, owner in list(waiting.items()):
                if _replace(run, before[run], owner):
                    taken[run] = before[run]
                    del waiting[run]
            if not waiting:
                return
        raise UserError(
            f"{next(iter(waiting))} is being launched by several commands at once: wait for them, "
            f"{FIX}"
        )
    except BaseException:
        for run, previous in taken.items():
            with contextlib.suppress(UserError):
                _replace(run, owners[run], previous)
        raise


@contextlib.contextmanager
def held(run: Path, owner: Owner, lives: Lives) -> Iterator[None]:
    """Own a run folder for the time of the block. Raises UserError as :func:`claim` does."""
    claim({run: owner}, lives)
    try:
        yield
    finally:
        release(run, owner)


def refusals(runs: Iterable[Path], lives: Lives) -> list[str]:
    """A message for each of the folders that belongs to a launch which lives."""
    owners = {run: owner_of(run) for run in runs}
    return [_refusal(run, owners[run], life) for run, life in lives(owners).items()]


def _refusal(run: Path, owner: Owner | None, life: str) -> str:
    """Why a folder can't be had: who owns it, since when, and what to type."""
    if owner is None:
        return f"the run folder {run} is taken: {life}; wait for its end or end it, {FIX}"
    fix = f"wait for it or end it, {FIX}"
    if owner.kind == SLURM and owner.name:
        fix = f"python -m jobs cancel {owner.name} ends it; wait for it, {FIX}"
    return f"the run folder {run} belongs to {describe(owner)}: {life}; {fix}"


def describe(owner: Owner) -> str:
    """The launch, its job or process, and since when."""
    since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(owner.since))
    where = f"process {owner.pid} on {owner.host}"
    if owner.kind == SLURM and owner.job:
        where = f"Slurm job {owner.job}"
    return f"{owner.name or 'python -m trainer'} ({where}, launched {since})"


def note_job(run: Path, owner: Owner, job: str) -> None:
    """Note the id that sbatch gave to the owner's job."""
    _replace(run, owner, replace(owner, job=job))


def release(run: Path, owner: Owner) -> None:
    """Give the folder back. Does nothing when another launch has it by now."""
    current = owner_of(run)
    if current is not None and current.launch == owner.launch:
        with contextlib.suppress(UserError):
            _replace(run, current, replace(current, ended=time.time()))


def process_life(run: Path, owner: Owner | None) -> str | None:
    """How a run is seen to live without asking Slurm: by its lease, or by the process that owns
    the folder or is submitting it. None when it isn't, or is a job that only Slurm knows.
    """
    holder = lease_holder(run)
    if holder is not None and not _is_slurms(holder, owner):
        return f"process {holder.get('pid')} on {holder.get('host')} trains in it"
    if owner is None or owner.ended or owner.job:
        return None
    doing = "it runs" if owner.kind == LOCAL else "it is being submitted"
    if owner.host == socket.gethostname():
        return doing if process_start(owner.pid) == owner.pid_start else None
    began = max(owner.since, float(read_json(run / LEASE).get("since") or 0.0))
    has_trained = began > owner.since
    if has_trained or time.time() - owner.since > LEASE_WAIT_S:
        return None
    return f"{doing} on {owner.host}, as far as can be seen from here"


def _is_slurms(holder: Mapping[str, Any], owner: Owner | None) -> bool:
    """Whether the lease is that of a Slurm job on another machine: Slurm knows better, since the
    lock of a lost node lingers.
    """
    is_job = bool(holder.get("job")) and owner is not None and owner.kind == SLURM
    return is_job and holder.get("host") != socket.gethostname()


def lease_holder(run: Path) -> dict[str, Any] | None:
    """What the holder of the run's lease wrote into it; None when nobody holds it.

    Never call it in the process that holds the lease: closing the file would drop the lock.
    """
    try:
        with (run / LEASE).open("rb") as file:
            # struct flock of 64-bit Linux: type, whence, start, length, pid
            query = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
            answer = fcntl.fcntl(file.fileno(), fcntl.F_GETLK, query)
    except OSError:  # no lease yet, or a file system without locks
        return None
    if struct.unpack("hhqqi4x", answer)[0] == fcntl.F_UNLCK:
        return None
    return read_json(run / LEASE)


def _replace(run: Path, before: Owner | None, after: Owner | None) -> bool:
    """Replace the owner if it still is ``before``. Raises UserError when it can't be written."""
    try:
        run.mkdir(mode=0o700, parents=True, exist_ok=True)
        with locked(run / LOCK, LOCK_WAIT_S):
            if owner_of(run) != before:
                return False
            if after is None:
                (run / FILE).unlink(missing_ok=True)
            else:
                atomic.write_json(run / FILE, asdict(after))
            return True
    except OSError as error:
        raise UserError(
            f"the run folder {run} can't be written ({error.strerror or error}); set "
            "trainer.default_local_dir to a folder of yours with free space"
        ) from error
