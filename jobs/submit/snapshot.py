"""Freeze the code at submit: a copy of it, its git commit, and the digest of the image."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json
from trainer.config.keys.conf_tree import conf_dir

PACKAGES = ("trainer", "jobs")
CHUNK = 1 << 22


def copy_code(target: Path) -> None:
    """Copy the packages that a rank needs into ``target``, as they are imported now. Does nothing
    when it exists.
    """
    if target.exists():
        return
    temp = target.with_name(f".{target.name}.new")
    shutil.rmtree(temp, ignore_errors=True)
    for package in PACKAGES:
        shutil.copytree(
            package_folder(package),
            temp / package,
            ignore=shutil.ignore_patterns("__pycache__", "*.pyc"),
        )
    conf = conf_dir()
    if not conf.is_relative_to(package_folder("trainer")):
        # Defaults of keys that a frozen config doesn't know.
        shutil.copytree(conf, temp / "conf")
    temp.rename(target)


def package_folder(package: str) -> Path:
    """The folder of a package's code."""
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    return Path(spec.origin).parent


def git_state() -> dict[str, Any]:
    """``{"commit": ..., "dirty": bool}`` of the code's repository; empty outside one."""
    where = str(package_folder("trainer"))

    def git(*words: str) -> str:
        done = subprocess.run(
            ["git", "-C", where, *words], capture_output=True, text=True, timeout=20, check=True
        )
        return done.stdout.strip()

    try:
        return {
            "commit": git("rev-parse", "HEAD"),
            "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        }
    except (OSError, subprocess.SubprocessError):
        return {}


def image_digest(image: Path, cache: Path) -> str:
    """``sha256:...`` of an image file; remembered in ``cache`` by size and time, since images have
    many GB.

    Raises UserError when there is no such file.
    """
    try:
        stat = image.stat()
    except OSError:
        raise UserError(
            f"container.image={image} does not exist; build it with 'make image', or give the path "
            "of a .sif file."
        ) from None
    key = f"{image.resolve()}:{stat.st_size}:{stat.st_mtime_ns}"
    known = read_json(cache)
    if key not in known:
        digest = hashlib.sha256()
        with image.open("rb") as file:
            while chunk := file.read(CHUNK):
                digest.update(chunk)
        known[key] = f"sha256:{digest.hexdigest()}"
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic.write_json(cache, known)
    return str(known[key])
