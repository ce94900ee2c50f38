"""Freeze the code at submit: a copy of it, its git commit, and the digest of the image."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import os
import shutil
import subprocess
from functools import lru_cache
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.json_files import open_regular
from trainer.base.run_folder import read_json
from trainer.config.keys.conf_tree import conf_dir

PACKAGES = ("trainer", "jobs")
CHUNK = 1 << 22


def code_digest() -> str:
    """SHA-256 (first 12 hex digits) of the code and configs that :func:`copy_code` copies."""
    digest = hashlib.sha256()
    for name, path in sorted(_code_files().items()):
        digest.update(f"{name}\0{path.stat().st_size}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def copy_code(folder: Path) -> None:
    """Copy the packages that a rank needs, as they are now, to ``folder``, whose name is their
    :func:`code_digest`. An equal copy is shared by all launches into one sweep folder.

    Raises UserError when the code is edited meanwhile.
    """
    if folder.exists():
        return
    temp = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(temp, ignore_errors=True)
    for name, path in _code_files().items():
        (temp / name).parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        shutil.copyfile(path, temp / name)
        (temp / name).chmod(0o400)
    if code_digest() != folder.name:
        shutil.rmtree(temp)
        raise UserError("the trainer's code was edited while it was copied; submit again")
    try:
        temp.rename(folder)
    except OSError:
        shutil.rmtree(temp)
        if not folder.exists():  # else another launch has just made the same copy
            raise


def _code_files() -> dict[str, Path]:
    """Path in the copy -> file, of the packages and of the defaults in ``conf``."""
    folders = {package: package_folder(package) for package in PACKAGES}
    conf = conf_dir()
    if not conf.is_relative_to(folders["trainer"]):
        # Defaults of keys that a frozen config doesn't know.
        folders["conf"] = conf
    return {
        f"{name}/{path.relative_to(folder)}": path
        for name, folder in folders.items()
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


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

    Raises UserError when there is no such file. A cache that can't be written is done without.
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
    if key in known:
        return str(known[key])
    digest = _digest_of_image(image, key)
    with contextlib.suppress(OSError):
        cache.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        atomic.write_json(cache, known | {key: digest})
    return digest


@lru_cache(maxsize=16)  # the check before a submit and the submit ask for the same
def _digest_of_image(image: Path, key: str) -> str:
    """``key``: of the file as it is now."""
    digest = hashlib.sha256()
    with open_regular(image) as file:
        while chunk := file.read(CHUNK):
            digest.update(chunk)
    return f"sha256:{digest.hexdigest()}"


def file_stamp(path: Path) -> str:
    """Size, and time of the last change in s, as ``stat -Lc '%s %.9Y'`` prints them."""
    stat = path.stat()
    seconds, rest = divmod(stat.st_mtime_ns, 10**9)
    return f"{stat.st_size} {seconds}.{rest:09d}"
