"""Submit runs again that ended before they were done: same folder, same config and code, a new
array and new budgets.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.evidence import require_folder
from jobs.ledger import Entry
from jobs.ownership import living_owners
from jobs.run_state import ALIVE
from jobs.slurm import Slurm
from jobs.submit.arrays import SlurmArray, read_script, submit_arrays, write_array
from jobs.submit.script import Script
from trainer.base import atomic, run_owner
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json
from trainer.base.run_owner import new_launch, new_owner

FILES = ("task.sh", "health.sh")
"""Files of an earlier batch that hold for the next one as they are."""


def resubmit_runs(entries: Sequence[Entry], ledger_path: Path) -> list[Entry]:
    """Submit ``entries`` again, those of one script as one array. The ledger's new entries.

    The script is made anew from what the submission stored. Raises UserError for a run without
    that, for one whose folder is gone, for one that ran on the launcher ``local`` or that somebody
    else has just launched again, and when sbatch refuses.
    """
    for entry in entries:
        require_folder(entry)
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        groups.setdefault(entry.script, []).append(entry)
    launch = new_launch()
    umask = os.umask(0o077)
    try:
        arrays = [_array(Path(script), members, launch) for script, members in groups.items()]
        planned = [entry for array in arrays for entry in array.entries]
        owners = {Path(e.run): new_owner(launch, run_owner.SLURM, e.name) for e in planned}
        run_owner.claim(owners, living_owners)
        try:
            for old, array in zip(groups, arrays, strict=True):
                write_array(array, {name: (Path(old) / name).read_text() for name in FILES})
            for entry in planned:
                record = Path(entry.run) / "job.json"
                atomic.write_json(record, read_json(record) | {"launch": launch})
            ledger.append(ledger_path, planned)
        except BaseException:
            for run, owner in owners.items():
                run_owner.release(run, owner)
            raise
        return submit_arrays(arrays, owners, ledger_path)
    finally:
        os.umask(umask)


def _array(old: Path, entries: Sequence[Entry], launch: str) -> SlurmArray:
    """The array that submits ``entries`` of the batch in folder ``old`` again."""
    script = read_script(old) if entries[0].script else None
    if script is None or not all((old / name).is_file() for name in FILES):
        reason = "has no batch script to submit again"
        if entries[0].job == ledger.LOCAL:
            reason = "ran on the local launcher"
        raise UserError(
            f"{entries[0].name} {reason}; run its sweep again: it goes on "
            "(hydra.launcher.resubmit=failed)."
        )
    folder = old.with_name(f"{old.name.rpartition('-')[0]}-{launch}")
    planned = [
        replace(
            entry,
            launch=launch,
            script=str(folder),
            phase=ledger.PLANNED,
            job="",
            time=time.time(),
        )
        for entry in entries
    ]
    return SlurmArray(
        folder=folder,
        script=_without_ended_dependency(script),
        launch=launch,
        entries=tuple(planned),
    )


def _without_ended_dependency(script: Script) -> Script:
    """``script`` without ``dependency`` once all jobs that it names have ended: Slurm refuses one
    on a job that it has forgotten, and one that can never be satisfied would wait for ever.
    """
    parameters = dict(script.parameters)
    extra: dict[str, Any] = dict(parameters.get("additional_parameters", {}))
    for values in (parameters, extra):
        dependency = str(values.get("dependency", ""))
        jobs = re.findall(r":(\d+)", dependency)
        if jobs and not _any_lives(jobs):
            del values["dependency"]
            sys.stdout.write(f"left out dependency={dependency}: these jobs have ended\n")
    return replace(script, parameters=parameters | {"additional_parameters": extra})


def _any_lives(jobs: Sequence[str]) -> bool:
    queue = Slurm().queue(jobs) or {}
    return any(job.state in ALIVE for job in queue.values())
