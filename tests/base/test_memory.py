"""In a Slurm job with ``--mem`` only the job's memory is free, whatever the node has."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from trainer.base.memory import free_device_bytes, free_host_bytes, oom_kills

GB = 1024**3
NO_LIMIT_V1 = 9223372036854771712
"""What version 1 says without a limit."""


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemTotal: 1 kB\nMemAvailable: {64 * GB // 1024} kB\n")
    return tmp_path / "proc"


def group(folder: Path, files: tuple[str, str], limit: object, usage: int, cache: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / files[0]).write_text(f"{limit}\n")
    (folder / files[1]).write_text(f"{usage}\n")
    (folder / "memory.stat").write_text(f"anon 5\ninactive_file {cache}\n")


V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes")
V2 = ("memory.max", "memory.current")


def test_without_a_cgroup_the_machine_counts(proc: Path, tmp_path: Path) -> None:
    assert free_host_bytes(proc, tmp_path / "none") == 64 * GB


def test_version_1(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("9:name=systemd:/x\n4:memory:/slurm/job_7/step_0\n0::/\n")
    group(root / "memory", V1, NO_LIMIT_V1, 70 * GB)
    group(root / "memory/slurm/job_7/step_0", V1, NO_LIMIT_V1, 3 * GB)
    assert free_host_bytes(proc, root) == 64 * GB
    group(root / "memory/slurm/job_7", V1, 16 * GB, 4 * GB)  # the limit is on the job, a parent
    assert free_host_bytes(proc, root) == 12 * GB


def test_version_2(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/system.slice/slurmstepd.scope/job_7/step_0\n")
    group(root / "system.slice/slurmstepd.scope/job_7", V2, 16 * GB, 6 * GB)
    group(root / "system.slice/slurmstepd.scope/job_7/step_0", V2, "max", 5 * GB)
    assert free_host_bytes(proc, root) == 10 * GB


def test_page_cache_of_the_group_is_free(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/job\n")
    group(root / "job", V2, 16 * GB, 15 * GB, cache=8 * GB)
    assert free_host_bytes(proc, root) == 9 * GB


def test_a_container_sees_its_own_group_as_the_root(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/../../docker/abc\n")
    group(root, V2, 8 * GB, 2 * GB)
    assert free_host_bytes(proc, root) == 6 * GB


def test_more_used_than_allowed_leaves_nothing(proc: Path, tmp_path: Path) -> None:
    (proc / "self/cgroup").write_text("0::/job\n")
    group(tmp_path / "cgroup/job", V2, GB, 2 * GB)
    assert free_host_bytes(proc, tmp_path / "cgroup") == 0


def test_memory_kills_are_those_of_the_slurm_job(proc: Path, tmp_path: Path) -> None:
    root = tmp_path / "cgroup"
    (proc / "self/cgroup").write_text("0::/slurmstepd.scope/job_7/step_batch\n")
    assert oom_kills(proc, root) == 0
    for folder, kills in ((".", 9), ("slurmstepd.scope/job_7", 2)):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "memory.events").write_text(f"oom 5\noom_kill {kills}\n")
    assert oom_kills(proc, root) == 2
    (proc / "self/cgroup").write_text("4:memory:/docker\n")
    (root / "memory/docker").mkdir(parents=True)
    (root / "memory/docker/memory.oom_control").write_text("under_oom 0\noom_kill 1\n")
    assert oom_kills(proc, root) == 1


def test_this_machine_has_some() -> None:
    assert 0 < free_host_bytes() < 2**50
    assert free_device_bytes(torch.device("cpu")) == pytest.approx(free_host_bytes(), rel=0.5)
