"""Free memory, as far as this process may use it."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

CGROUP_ROOT = Path("/sys/fs/cgroup")
V2_FILES = ("memory.max", "memory.current")
V1_FILES = ("memory.limit_in_bytes", "memory.usage_in_bytes")
"""Limit and usage of a cgroup, in bytes; a limit may be the word ``max``."""


def free_host_bytes(proc: Path = Path("/proc"), cgroup_root: Path = CGROUP_ROOT) -> int:
    """Bytes of host memory that this process can still use.

    The machine's available memory, or less where a cgroup limits this process: a Slurm job with
    ``--mem``, a container. Limits of all parent groups count, in version 1 and 2. Page cache that a
    group holds and would give back counts as free.
    """
    free = [_available_bytes(proc / "meminfo")]
    for folder, files in _cgroups(proc / "self" / "cgroup", cgroup_root):
        free.append(_left_in(folder, files))
    return max(0, min(free))


def free_device_bytes(device: torch.device) -> int:
    """Bytes that ``device`` can still give this process, cached blocks included; host memory for a
    CPU.
    """
    if device.type != "cuda":
        return free_host_bytes()
    import torch

    torch.cuda.empty_cache()
    return int(torch.cuda.mem_get_info(device)[0])


def oom_kills(proc: Path = Path("/proc"), cgroup_root: Path = CGROUP_ROOT) -> int:
    """How many processes the kernel has killed for their memory in this process's cgroup.

    In a Slurm job that is the job's group on this node, with all its steps. 0 where the kernel
    does not say.
    """
    counts: list[int] = []
    for folder, files in _cgroups(proc / "self" / "cgroup", cgroup_root):
        name = "memory.events" if files == V2_FILES else "memory.oom_control"
        for line in _read(folder / name).splitlines():
            key, _, value = line.partition(" ")
            if key == "oom_kill" and value.isdigit():
                counts.append(int(value))
                if folder.name.startswith("job_"):
                    return int(value)
    return counts[-1] if counts else 0


def _available_bytes(meminfo: Path) -> int:
    for line in _read(meminfo).splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return sys.maxsize


def _cgroups(membership: Path, root: Path) -> list[tuple[Path, tuple[str, str]]]:
    """The folders of this process's memory cgroups and their parents, with their file names.

    ``membership`` (cgroups(7)) has a line ``ID:CONTROLLERS:PATH`` per hierarchy; version 2 has ID
    0 and no controllers. In a container the path may be the host's and not exist here: then the
    mounted root is the container's own group.
    """
    groups: list[tuple[Path, tuple[str, str]]] = []
    for line in _read(membership).splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            mounts = [root, root / "unified"]
            files = V2_FILES
        elif "memory" in controllers.split(","):
            mounts = [root / "memory"]
            files = V1_FILES
        else:
            continue
        for mount in mounts:
            groups += [(folder, files) for folder in _with_parents(mount, path)]
    return groups


def _with_parents(mount: Path, path: str) -> list[Path]:
    parts = [part for part in path.split("/") if part not in ("", "..")]
    return [mount.joinpath(*parts[:length]) for length in range(len(parts) + 1)]


def _left_in(folder: Path, files: tuple[str, str]) -> int:
    """Bytes that a cgroup leaves; a very large number without a limit."""
    limit = _read(folder / files[0]).strip()
    usage = _read(folder / files[1]).strip()
    if not limit.isdigit() or not usage.isdigit():
        return sys.maxsize
    return int(limit) - int(usage) + _reclaimable(folder)


def _reclaimable(folder: Path) -> int:
    """Bytes of page cache that the kernel drops when the group needs memory."""
    for name in ("total_inactive_file", "inactive_file"):
        for line in _read(folder / "memory.stat").splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    return 0


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
