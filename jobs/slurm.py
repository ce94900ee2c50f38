"""Slurm's commands, each with a time limit: when slurmctld is gone they hang for minutes."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from jobs.environment import client_environment
from trainer.base.errors import UserError

TIMEOUT_S = 30.0
MOST_TASKS = 4_000_001
"""Slurm's largest MaxArraySize."""


@dataclass(frozen=True, kw_only=True)
class JobInfo:
    """What Slurm says about one array task."""

    state: str
    reason: str = ""
    nodes: str = ""
    restarts: int = 0


class Slurm:
    """Slurm's client commands. Tests put fake ones on PATH instead of replacing this class."""

    def __init__(self, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        """Run one command. Raises UserError when it is missing or doesn't answer in time."""
        try:
            return subprocess.run(
                list(command),
                env=client_environment(os.environ),
                capture_output=True,
                text=True,
                timeout=self.timeout_s,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise UserError(
                f"'{command[0]}' didn't answer within {self.timeout_s:.0f} s: is Slurm's "
                "controller up? Try 'sinfo'."
            ) from None

    def require(self, *, answering: bool = False) -> None:
        """Raises UserError when there is no Slurm on this machine, or, where it is to be
        ``answering``, when its controller isn't reached.
        """
        missing = [
            tool for tool in ("sbatch", "squeue", "scontrol", "srun") if shutil.which(tool) is None
        ]
        if missing:
            raise UserError(
                f"There is no '{missing[0]}' on this machine's PATH, so nothing can be submitted "
                "to Slurm. "
                "Log in to the cluster, or run the sweep on this machine with hydra/launcher=local."
            )
        if answering:
            done = self.run("scontrol", "show", "config")
            if done.returncode:
                said = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
                raise UserError(
                    f"Slurm's controller isn't reached from this machine ({said[0]}), so nothing "
                    "can be submitted. Type the command on a login node of the cluster, or run the "
                    "sweep on this machine with hydra/launcher=local; hydra.launcher.dry_run=true "
                    "shows the scripts."
                )

    def max_array_size(self) -> int:
        """MaxArraySize; Slurm's default of 1001 when it can't be read."""
        match = re.search(
            r"^MaxArraySize\s*=\s*(\d+)",
            self.run("scontrol", "show", "config").stdout,
            re.MULTILINE,
        )
        return int(match.group(1)) if match else 1001

    def partitions(self) -> list[str]:
        """Names of the partitions, the default one first."""
        lines = self.run("sinfo", "-h", "-o", "%P").stdout.split()
        return [p.rstrip("*") for p in sorted(set(lines), key=lambda p: (not p.endswith("*"), p))]

    def gpus_per_node(self, partition: str | None) -> int | None:
        """Most GPUs that a node of the partition has; None when Slurm doesn't say."""
        selection = ["-p", partition] if partition else []
        text = self.run("sinfo", "-h", "-o", "%G", *selection).stdout
        counts = [
            sum(int(n) for n in re.findall(r"gpu:(?:[^:,()]+:)?(\d+)", line))
            for line in text.splitlines()
        ]
        return max(counts) if counts else None

    def partition_seconds(self, partition: str | None, key: str) -> int | None:
        """``GraceTime`` or ``MaxTime`` of a partition in seconds; None without a limit."""
        name = partition or next(iter(self.partitions()), None)
        if name is None:
            return None
        shown = self.run("scontrol", "show", "partition", name).stdout
        match = re.search(rf"\b{key}=(\S+)", shown)
        return seconds(match.group(1)) if match else None

    def max_nodes_per_job(self, partition: str | None) -> int | None:
        """Most nodes that a job gets in any of the comma-separated partitions; None when Slurm
        doesn't say.
        """
        sizes: list[int] = []
        for name in (partition or next(iter(self.partitions()), "")).split(","):
            text = self.run("scontrol", "show", "partition", name).stdout if name else ""
            limits = [int(n) for n in re.findall(r"\b(?:MaxNodes|TotalNodes)=(\d+)", text)]
            if not limits:
                return None
            sizes.append(min(limits))
        return max(sizes)

    def queue(self, job_ids: Iterable[str]) -> dict[str, JobInfo] | None:
        """Array tasks that Slurm still holds, by ``ARRAY_INDEX``: one squeue call for all. None: no
        Slurm here.

        Raises UserError with Slurm's message when it doesn't answer: an unknown job is not a lost
        one.
        """
        arrays = sorted({job.split("_")[0] for job in job_ids if job})
        if not arrays:
            return {}
        if shutil.which("squeue") is None:
            return None
        done = self.run(
            "squeue", "-h", "-r", "-t", "all", "-j", ",".join(arrays), "-o", "%A|%F|%K|%T|%r|%N"
        )
        if done.returncode and "Invalid job id" not in done.stderr:
            message = done.stderr.strip() or f"exit code {done.returncode}"
            raise UserError(f"squeue failed: {message.rstrip('.')}.")
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") == 5]
        return {
            f"{row[1]}_{row[2]}": JobInfo(state=row[3], reason=row[4], nodes=row[5]) for row in rows
        }

    def accounting(self, job_ids: Iterable[str]) -> dict[str, JobInfo]:
        """What sacct remembers of array tasks (their newest attempt)."""
        arrays = sorted({job.split("_")[0] for job in job_ids if job})
        if not arrays or shutil.which("sacct") is None:
            return {}
        done = self.run(
            "sacct", "-X", "-n", "-P", "-j", ",".join(arrays), "-o", "JobID,State,NodeList,Reason"
        )
        rows = [line.split("|") for line in done.stdout.splitlines() if line.count("|") >= 3]
        return {
            job: JobInfo(state=row[1].split(" ")[0], nodes=row[2], reason=row[3])
            for row in rows
            for job in tasks_of(row[0])
        }

    def cancel(self, job_ids: Sequence[str]) -> None:
        """Run scancel. Raises UserError with Slurm's message when it refuses."""
        done = self.run("scancel", *job_ids)
        if done.returncode:
            raise UserError(f"scancel refused: {done.stderr.strip()}")

    def test_only(self, script: str) -> str:
        """What ``sbatch --test-only`` says about a script file. Raises UserError when it would be
        refused.
        """
        done = self.run("sbatch", "--test-only", script)
        message = (done.stderr or done.stdout).strip()
        if done.returncode:
            raise UserError(f"sbatch would refuse this job: {message}")
        return message


def tasks_of(job: str) -> list[str]:
    """Array tasks that never started are one row in sacct: ``7_[0-2,5%4]`` -> 7_0, 7_1, 7_2,
    7_5.
    """
    array, bracket, rest = job.partition("_[")
    if not bracket:
        return [job]
    tasks: list[str] = []
    for low, high in re.findall(r"(\d{1,8})(?:-(\d{1,8}))?", rest.partition("%")[0]):
        last = min(int(high or low), MOST_TASKS)
        tasks += [f"{array}_{n}" for n in range(int(low), last + 1)]
        if len(tasks) > MOST_TASKS:
            break  # nothing that Slurm wrote
    return tasks[:MOST_TASKS]


def seconds(text: str) -> int | None:
    """Slurm's times: ``30``, ``10:00``, ``1-00:00:00`` -> s; UNLIMITED, INFINITE, NONE -> None."""
    if not re.fullmatch(r"(\d+-)?\d+(:\d+){0,2}", text):
        return None
    days, _, rest = text.rpartition("-")
    total = 0
    for part in rest.split(":"):
        total = total * 60 + int(part)
    if days and rest.count(":") < 2:
        total *= 60 if rest.count(":") == 1 else 3600
    return total + 86400 * int(days or 0)
