"""Hand a plan to Slurm through Submitit. Every launch is written to the ledger before
sbatch runs, and again after.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.ledger import Entry
from jobs.ownership import living_owners
from jobs.progress import Progress
from jobs.slurm import Slurm
from jobs.submit.arrays import SlurmArray, submit_arrays, write_array
from jobs.submit.freeze import (
    batch_paths,
    entry_of,
    files_of,
    freeze_run,
    job_record,
    private_folder,
)
from jobs.submit.names import display_names, free_sweep_name
from jobs.submit.options import SlurmOptions
from jobs.submit.plan import JobBatch, SweepPlan
from jobs.submit.preflight import cache_file
from jobs.submit.runtime import BatchPaths
from jobs.submit.script import Script, script_of
from jobs.submit.snapshot import code_digest, copy_code, file_stamp, git_state, image_digest
from trainer.base import run_owner
from trainer.base.run_owner import Owner, new_launch


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything a submission needs besides the plan."""

    sweep: str
    """Its name in the ledger."""
    group: str
    """Its name in W&B, and in the ledger unless other runs have it."""
    sweep_dir: Path
    options: SlurmOptions
    ledger: Path
    python: str
    """This interpreter, for jobs without an image."""
    code: str = field(default_factory=code_digest)
    """Digest of the code that the jobs run; its copy is ``SWEEP/code/DIGEST``."""


def submit(plan: SweepPlan, submission: Submission) -> list[Entry]:
    """Claim the run folders, freeze and submit every batch; returns the ledger's entries.

    Raises UserError for a folder whose earlier launch lives, before anything is written; and with
    sbatch's message when it refuses, see :func:`jobs.submit.arrays.submit_arrays`.
    """
    umask = os.umask(0o077)
    try:
        with ledger.locked(submission.ledger):
            arrays, owners = _prepare(plan, submission)
        return submit_arrays(arrays, owners, submission.ledger)
    finally:
        os.umask(umask)


def _prepare(plan: SweepPlan, submission: Submission) -> tuple[list[SlurmArray], dict[Path, Owner]]:
    """Claim the run folders, freeze them, and note the launch in the ledger."""
    known = ledger.read(submission.ledger)
    sweep = free_sweep_name(submission.group, plan.jobs, known)
    submission = replace(submission, sweep=sweep)
    launch = new_launch()
    git = git_state()
    arrays = [_array(batch, submission, launch, git) for batch in plan.batches]
    private_folder(submission.sweep_dir)
    owners = {
        Path(entry.run): run_owner.new_owner(launch, run_owner.SLURM, entry.name)
        for array in arrays
        for entry in array.entries
    }
    run_owner.claim(owners, living_owners)
    try:
        names = display_names(plan.jobs, sweep)
        copy_code(submission.sweep_dir / "code" / submission.code)
        for batch, array in zip(plan.batches, arrays, strict=True):
            _freeze_batch(batch, array, submission, git, names)
        ledger.append(submission.ledger, [e for array in arrays for e in array.entries])
    except BaseException:
        for run, owner in owners.items():
            run_owner.release(run, owner)
        raise
    return arrays, owners


def _array(
    batch: JobBatch, submission: Submission, launch: str, git: Mapping[str, Any]
) -> SlurmArray:
    """The array of a batch. Writes nothing."""
    paths = _paths(batch, submission, launch)
    now = time.time()
    entries = [
        entry_of(job, sweep=submission.sweep, launch=launch, script=str(paths.folder), now=now)
        for job in batch.jobs
    ]
    return SlurmArray(
        folder=paths.folder,
        script=_script(batch, submission, paths, git),
        launch=launch,
        entries=tuple(entries),
    )


def _freeze_batch(
    batch: JobBatch,
    array: SlurmArray,
    submission: Submission,
    git: Mapping[str, Any],
    names: Mapping[int, str],
) -> None:
    """Write the run folders of a batch, and the files of its script."""
    image = image_of(batch)
    with Progress("frozen", len(batch.jobs)) as progress:
        for count, (job, entry) in enumerate(zip(batch.jobs, array.entries, strict=True), start=1):
            record = job_record(
                job,
                submission.options,
                sweep=entry.sweep,
                name=entry.name,
                display_name=names[job.index],
                launch=array.launch,
                image=image,
                git=git,
                code=submission.code,
            )
            freeze_run(job, record)
            progress(count)
    write_array(array, files_of(batch, _paths(batch, submission, array.launch)))


def _paths(batch: JobBatch, submission: Submission, launch: str) -> BatchPaths:
    folder = submission.options.submitit_folder
    return batch_paths(batch, submission.sweep_dir, folder, launch, submission.code)


def _script(
    batch: JobBatch, submission: Submission, paths: BatchPaths, git: Mapping[str, Any]
) -> Script:
    environment = {"WANDB_RUN_GROUP": submission.group}
    image = image_of(batch)
    if image.get("digest"):
        environment["PLIMSOLL_IMAGE_DIGEST"] = str(image["digest"])
    if git:
        environment["PLIMSOLL_GIT_COMMIT"] = str(git["commit"]) + ("-dirty" if git["dirty"] else "")
    return script_of(
        batch.shape,
        submission.options,
        paths,
        sweep=submission.sweep,
        interpreter=submission.python,
        environment=environment,
        image=image,
    )


def image_of(batch: JobBatch) -> dict[str, Any]:
    """Path and digest of the batch's image, and whether each attempt checks it; empty without one.
    ``file`` are size and time of the image's file; missing for one that lies in a registry.
    """
    container = batch.shape.container
    if container.runtime == "none" or container.image is None:
        return {}
    record = {"path": container.image, "digest": container.digest or "", "verify": container.verify}
    path = Path(container.image)
    if container.runtime == "apptainer" or path.is_file():
        record["digest"] = image_digest(path, cache_file())
        record["file"] = file_stamp(path)
    return record


def scripts(plan: SweepPlan, submission: Submission) -> list[tuple[JobBatch, str]]:
    """The exact batch scripts of a plan; writes nothing."""
    launch = "0" * 12
    git = git_state()
    return [
        (batch, _array(batch, submission, launch, git).executor().text(len(batch.jobs)))
        for batch in plan.batches
    ]


def test_only(plan: SweepPlan, submission: Submission, slurm: Slurm) -> list[tuple[JobBatch, str]]:
    """What ``sbatch --test-only`` says about every script."""
    answers: list[tuple[JobBatch, str]] = []
    for batch, text in scripts(plan, submission):
        with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
            file.write(text)
            file.flush()
            answers.append((batch, slurm.test_only(file.name)))
    return answers
