"""Hand a plan to Slurm through Submitit. Every launch is written to the ledger before
sbatch runs, and again after.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs import ledger
from jobs.progress import Progress
from jobs.slurm import Slurm
from jobs.submit.freeze import (
    batch_paths,
    entry_of,
    freeze_run,
    job_record,
    new_launch,
    private_folder,
    write_batch,
)
from jobs.submit.options import SlurmOptions
from jobs.submit.payload import Rank
from jobs.submit.plan import JobBatch, SweepPlan
from jobs.submit.preflight import cache_file
from jobs.submit.script import script_of
from jobs.submit.snapshot import copy_code, git_state, image_digest
from trainer.base.errors import UserError


@dataclass(frozen=True, kw_only=True)
class Submission:
    """Everything a submission needs besides the plan."""

    sweep: str
    sweep_dir: Path
    options: SlurmOptions
    ledger: Path
    python: str
    """This interpreter, for jobs without an image."""


def submit(plan: SweepPlan, submission: Submission) -> list[ledger.Entry]:
    """Freeze and submit every batch; returns the ledger's entries.

    Raises UserError with sbatch's message when it refuses.
    """
    umask = os.umask(0o077)
    try:
        private_folder(submission.sweep_dir)
        copy_code(submission.sweep_dir / "code")
        launch = new_launch()
        git = git_state()
        return [
            entry
            for batch in plan.batches
            for entry in _submit_batch(batch, submission, launch, git)
        ]
    finally:
        os.umask(umask)


def _submit_batch(
    batch: JobBatch, submission: Submission, launch: str, git: Mapping[str, Any]
) -> list[ledger.Entry]:
    paths = batch_paths(batch, submission.sweep_dir, submission.options.submitit_folder, launch)
    now = time.time()
    entries = [
        entry_of(job, sweep=submission.sweep, launch=launch, script=str(paths.folder), now=now)
        for job in batch.jobs
    ]
    image = image_of(batch)
    with Progress("frozen", len(entries)) as progress:
        for count, (job, entry) in enumerate(zip(batch.jobs, entries, strict=True), start=1):
            record = job_record(
                job,
                submission.options,
                sweep=entry.sweep,
                name=entry.name,
                launch=launch,
                image=image,
                git=git,
            )
            freeze_run(job, record)
            progress(count)
    write_batch(batch, paths)
    ledger.append(submission.ledger, entries)
    executor = executor_of(batch, submission, launch, git)
    try:
        ids = executor.submit_runs([Rank(str(job.run)) for job in batch.jobs])
    except Exception as error:  # Submitit wraps sbatch's message in its own error
        raise UserError(f"sbatch refused batch {batch.name}: {str(error).strip()}") from error
    done = [
        ledger.submitted(entry, job, time.time()) for entry, job in zip(entries, ids, strict=True)
    ]
    ledger.append(submission.ledger, done)
    return done


def executor_of(
    batch: JobBatch, submission: Submission, launch: str, git: Mapping[str, Any]
) -> Any:
    """A Submitit executor with the batch's script."""
    from jobs.submit.executor import ArrayExecutor

    paths = batch_paths(batch, submission.sweep_dir, submission.options.submitit_folder, launch)
    environment = {"WANDB_RUN_GROUP": submission.sweep}
    image = image_of(batch)
    if image:
        environment["PLIMSOLL_IMAGE_DIGEST"] = str(image["digest"])
    if git:
        environment["PLIMSOLL_GIT_COMMIT"] = str(git["commit"]) + ("-dirty" if git["dirty"] else "")
    script = script_of(
        batch.shape,
        submission.options,
        paths,
        sweep=submission.sweep,
        interpreter=submission.python,
        environment=environment,
    )
    executor = ArrayExecutor(
        folder=paths.folder,
        max_num_timeout=submission.options.max_num_timeout,
        python=script.python,
    )
    executor.update_parameters(**script.parameters)
    return executor


def image_of(batch: JobBatch) -> dict[str, str]:
    """Path and digest of the batch's image; empty without one."""
    container = batch.shape.container
    if container.runtime == "none" or container.image is None:
        return {}
    if container.runtime == "pyxis":
        return {"path": container.image, "digest": container.digest or ""}
    return {"path": container.image, "digest": image_digest(Path(container.image), cache_file())}


def scripts(plan: SweepPlan, submission: Submission) -> list[tuple[JobBatch, str]]:
    """The exact batch scripts of a plan; writes nothing."""
    launch = "0" * 12
    git = git_state()
    return [
        (batch, executor_of(batch, submission, launch, git).text(len(batch.jobs)))
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
