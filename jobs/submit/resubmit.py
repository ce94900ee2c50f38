"""Submit runs again that ended before they were done: same folder, same config, same script, a new
array and budget.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from jobs import ledger
from jobs.ledger import Entry
from jobs.submit.freeze import new_launch, private_folder
from jobs.submit.payload import Rank
from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json


def resubmit_runs(entries: Sequence[Entry], ledger_path: Path) -> list[Entry]:
    """Submit ``entries`` again, those of one script as one array. The ledger's new entries.

    Raises UserError for a run whose script is gone or that ran on the launcher ``local``.
    """
    groups: dict[str, list[Entry]] = {}
    for entry in entries:
        if not entry.script or not _script_of(Path(entry.script)):
            reason = "has no batch script to submit again"
            if entry.job == ledger.LOCAL:
                reason = "ran on the local launcher"
            raise UserError(
                f"{entry.name} {reason}; run its sweep again: it goes on "
                "(hydra.launcher.resubmit=failed)."
            )
        groups.setdefault(entry.script, []).append(entry)
    launch = new_launch()
    done = []
    umask = os.umask(0o077)
    try:
        for script, members in groups.items():
            done += _resubmit_batch(Path(script), members, ledger_path, launch)
    finally:
        os.umask(umask)
    return done


def _script_of(folder: Path) -> Path | None:
    return next(iter(sorted(folder.glob("*_submission.sh"))), None)


def _resubmit_batch(
    old: Path, entries: Sequence[Entry], ledger_path: Path, launch: str
) -> list[Entry]:
    from jobs.submit.executor import resubmit_script

    folder = old.with_name(f"{old.name.rpartition('-')[0]}-{launch}")
    private_folder(folder)
    script = _script_of(old)
    assert script is not None
    for name in ("task.sh", "health.sh"):
        shutil.copy2(old / name, folder / name)
    (folder / "runs.txt").write_text("".join(f"{entry.run}\n" for entry in entries))
    text = script.read_text().replace(str(old), str(folder))
    text = re.sub(
        r"^#SBATCH --array=0-\d+%(\d+)$",
        rf"#SBATCH --array=0-{len(entries) - 1}%\1",
        text,
        flags=re.MULTILINE,
    )
    now = time.time()
    planned = [
        replace(e, launch=launch, script=str(folder), phase=ledger.PLANNED, job="", time=now)
        for e in entries
    ]
    for entry in planned:
        record = read_json(Path(entry.run) / "job.json")
        atomic.write_json(Path(entry.run) / "job.json", record | {"launch": launch})
    ledger.append(ledger_path, planned)
    ids = resubmit_script(folder, text, [Rank(entry.run) for entry in planned])
    done = [
        ledger.submitted(entry, job, time.time()) for entry, job in zip(planned, ids, strict=True)
    ]
    ledger.append(ledger_path, done)
    return done
