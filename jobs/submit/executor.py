"""Submitit's Slurm executor for arrays of ``Rank`` payloads."""

from __future__ import annotations

import os
import shlex
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from submitit.core import utils
from submitit.slurm.slurm import SlurmExecutor, SlurmJob

from jobs.environment import left_behind
from jobs.submit.script import Script
from trainer.base.rank_info import LAUNCH

SUBMIT_TIMEOUT_S = 120
"""sbatch hangs for minutes when slurmctld is gone."""


class ArrayExecutor(SlurmExecutor):  # type: ignore[misc]
    """Always submits an array, even of one: every script is the same, and job ids have one form.

    Differs from its parent in three more places: sbatch has a time limit, it gets of this
    environment what :mod:`jobs.environment` lets pass, and the copy made for an array keeps
    ``python``.
    """

    named: tuple[str, ...] = ()
    """Further variables that pass to the jobs (``cluster.env``)."""

    def submit_runs(self, payloads: Sequence[Any]) -> list[str]:
        """Submit one task per payload; their job ids ``ARRAY_INDEX``, in order."""
        submissions = [utils.DelayedSubmission(payload) for payload in payloads]
        return [job.job_id for job in self._internal_process_submissions(submissions)]

    def _internal_process_submissions(
        self, delayed_submissions: list[utils.DelayedSubmission]
    ) -> list[Any]:
        pickles: list[Path] = []
        for submission in delayed_submissions:
            submission.set_timeout(self.parameters.get("time", 5), self.max_num_timeout)
            pickles.append(self.folder / f"{uuid.uuid4().hex}.pkl")
            submission.dump(pickles[-1])
        self.parameters["map_count"] = len(pickles)
        first = self._submit_command(self._submitit_command_str)
        jobs = [
            SlurmJob(folder=self.folder, job_id=f"{first.job_id}_{n}", tasks=[0])
            for n in range(len(pickles))
        ]
        for job, path in zip(jobs, pickles, strict=True):
            job.paths.move_temporary_file(path, "submitted_pickle")
        return jobs

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        # Names only: a value on a command line is seen by everyone on this machine.
        removed = [word for name in left_behind(os.environ, self.named) for word in ("-u", name)]
        submit = ["timeout", str(SUBMIT_TIMEOUT_S), "sbatch", "--export=ALL"]
        return ["env", *removed, *submit, str(submission_file_path)]

    def text(self, count: int) -> str:
        """The script for an array of ``count`` jobs, exactly as it is given to sbatch."""
        self.parameters["map_count"] = count
        return str(self._make_submission_file_text(self._submitit_command_str, "dry-run"))


def make_executor(script: Script, folder: Path, launch: str) -> ArrayExecutor:
    """The executor of one array, whose files lie in ``folder``."""
    head = [f"FOLDER={shlex.quote(str(folder))}", f"export {LAUNCH}={launch}"]
    executor = ArrayExecutor(folder=folder, python=script.python)
    executor.named = tuple(script.named)
    setup = [*head, *script.parameters["setup"]]
    executor.update_parameters(**{**script.parameters, "setup": setup})
    return executor
