"""Read what is known of runs: the records in their folders, and Slurm's answers."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs import records
from jobs.attempt import causes
from jobs.ledger import LOCAL, PLANNED, Entry
from jobs.run_state import ALIVE, FolderEvidence, RunState, state_of
from jobs.slurm import JobInfo, Slurm
from trainer.base import run_folder, run_owner
from trainer.base.errors import UserError
from trainer.base.processes import process_start
from trainer.base.rank_records import FINISHED, end_file, read_end


def states_of(entries: Sequence[Entry], slurm: Slurm | None) -> dict[str, RunState]:
    """The state of every run by run folder. Slurm is asked once for all of them; None: not at all.

    Raises UserError when Slurm doesn't answer.
    """
    evidence = {entry.run: read_evidence(entry) for entry in entries}
    queue: Mapping[str, JobInfo] | None = None
    accounting: Mapping[str, JobInfo] = {}
    if slurm is not None:
        open_runs = [
            entry
            for entry in entries
            if entry.job not in ("", LOCAL) and not _is_done(entry, evidence[entry.run])
        ]
        queue = slurm.queue([entry.job for entry in open_runs]) if open_runs else {}
        gone = [entry for entry in open_runs if not _is_alive(entry, queue)]
        if queue is not None:
            unknown = [entry.job for entry in gone if entry.job not in queue]
            accounting = slurm.accounting(unknown) if unknown else {}
        # Read again: a job may have ended between the first look and the queue's.
        evidence |= {entry.run: read_evidence(entry) for entry in gone}
    now = time.time()
    return {
        entry.run: state_of(entry, evidence[entry.run], queue, accounting, now=now)
        for entry in entries
    }


def read_evidence(entry: Entry) -> FolderEvidence:
    """What the run's folder says about this launch."""
    run = Path(entry.run)
    begun = run_folder.last_attempt(run)
    begin = run_folder.read_json(run_folder.log_folder(run, begun) / "begin.json")
    cancelled = run_folder.read_json(run / "cancel.json")
    return FolderEvidence(
        attempts=records.attempts(run),
        begun=begun,
        last_write=records.newest_write(run, begun),
        launch_begun=begun > 0 and begin.get("launch", entry.launch) == entry.launch,
        cancelled=cancelled.get("launch") == entry.launch,
        refused=records.refused(run, entry.launch),
        folder_exists=run.is_dir(),
        process_alive=entry.job != LOCAL or _local_alive(entry, begin),
        finished=_has_finished(run, begun),
    )


def _local_alive(entry: Entry, begin: dict[str, object]) -> bool:
    """Whether the process of a local run lives; of one that waits for its turn, the launcher's."""
    if entry.phase != PLANNED:
        return _process_alive(begin)
    run = Path(entry.run)
    owner = run_owner.owner_of(run)
    if owner is None or owner.launch != entry.launch:
        return False
    return run_owner.process_life(run, owner) is not None


def _has_finished(run: Path, attempt: int) -> bool:
    """Whether rank 0 of an attempt has recorded that it finished the run."""
    end = read_end(end_file(run_folder.log_folder(run, attempt), 0))
    return end is not None and end.kind == FINISHED


def require_folder(entry: Entry) -> None:
    """Raise UserError when the run's folder was deleted or moved."""
    if not Path(entry.run).is_dir():
        raise UserError(
            f"{entry.name}: there is no run folder {entry.run} any more. If it was moved, move it "
            "back or link it there; if it was deleted, run its sweep again: it starts anew."
        )


def _process_alive(begin: dict[str, object]) -> bool:
    """Whether the process of a local attempt lives; True for one on another machine."""
    if begin.get("nodes") != socket.gethostname():
        return True
    recorded = begin.get("pid_start")
    pid = begin.get("pid")
    if not recorded or not isinstance(pid, int):
        return False
    return process_start(pid) == recorded


def _is_alive(entry: Entry, queue: Mapping[str, JobInfo] | None) -> bool:
    """Whether the queue has the job as one that has not ended; True when there is no queue."""
    if queue is None:
        return True
    return entry.job in queue and queue[entry.job].state in ALIVE


def _is_done(entry: Entry, evidence: FolderEvidence) -> bool:
    if not evidence.attempts:
        return False
    last = evidence.attempts[-1]
    return last.get("cause") == causes.DONE and last.get("launch") == entry.launch
