"""``python -m jobs doctor``: is everything in place before a sweep is submitted?"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jobs.slurm import Slurm
from jobs.submit.preflight import cache_file
from jobs.submit.snapshot import image_digest
from trainer.base.errors import UserError

PACKAGES = ("torch", "deepspeed", "transformers", "vllm", "submitit", "pydantic", "omegaconf")
NEEDED = ("submitit", "pydantic", "omegaconf", "torch")
"""Without these a rank can't start."""
PROBE = (
    "import json, sys\nfrom importlib import metadata\n"
    "def version(name):\n try: return metadata.version(name)\n except Exception: return None\n"
    "print(json.dumps({'python': sys.version.split()[0], **{n: version(n) for n in "
    "sys.argv[1].split(',')}}))"
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """One line of the report."""

    ok: bool
    check: str
    detail: str


def examine(
    *, image: Path | None, digest: str | None, python: str, binds: Sequence[str], folder: Path
) -> list[Result]:
    """All checks, in order; none raises."""
    results = [_slurm(), _writable(folder)]
    if image is not None:
        results += _image(image, digest, python, binds)
    return results


def _slurm() -> Result:
    slurm = Slurm(timeout_s=10)
    try:
        slurm.require()
        partitions = slurm.partitions()
    except UserError as error:
        return Result(ok=False, check="slurm", detail=str(error))
    if not partitions:
        return Result(
            ok=False, check="slurm", detail="sinfo shows no partition: is the controller up?"
        )
    return Result(ok=True, check="slurm", detail=f"partitions {', '.join(partitions)}")


def _writable(folder: Path) -> Result:
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        with tempfile.NamedTemporaryFile(dir=folder):
            pass
    except OSError as error:
        return Result(
            ok=False, check="run folders", detail=f"{folder} can't be written: {error.strerror}"
        )
    free = shutil.disk_usage(folder).free / 1e9
    return Result(
        ok=True, check="run folders", detail=f"{folder.resolve()} is writable, {free:.0f} GB free"
    )


def _image(image: Path, digest: str | None, python: str, binds: Sequence[str]) -> list[Result]:
    if shutil.which("apptainer") is None:
        return [Result(ok=False, check="apptainer", detail="there is no 'apptainer' on PATH")]
    try:
        actual = image_digest(image, cache_file())
    except UserError as error:
        return [Result(ok=False, check="image", detail=str(error))]
    results = [
        Result(
            ok=digest in (None, actual),
            check="digest",
            detail=actual if digest in (None, actual) else f"{actual}, not {digest}",
        )
    ]
    flags = [word for bind in binds for word in ("--bind", bind)]
    command = [
        "apptainer",
        "--silent",
        "exec",
        "--cleanenv",
        "--no-home",
        "--no-mount",
        "home,cwd",
        *flags,
        str(image),
    ]
    results.append(_versions([*command, python, "-c", PROBE, ",".join(PACKAGES)]))
    results += [_bind_check(command, bind) for bind in binds]
    return results


def _versions(command: Sequence[str]) -> Result:
    code, out, err = _run(command)
    if code:
        return Result(
            ok=False, check="python in the image", detail=f"exit code {code}: {err.strip()[-300:]}"
        )
    try:
        versions = json.loads(out.strip().splitlines()[-1])
    except (ValueError, IndexError):
        return Result(
            ok=False, check="python in the image", detail=f"answered {out.strip()[-300:]!r}"
        )
    missing = [name for name in NEEDED if versions.get(name) is None]
    text = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    return Result(
        ok=not missing,
        check="versions",
        detail=text + (f"; missing: {', '.join(missing)}" if missing else ""),
    )


def _bind_check(command: Sequence[str], bind: str) -> Result:
    target = bind.split(":")[1] if ":" in bind else bind
    code, _, err = _run([*command, "ls", target])
    return Result(
        ok=code == 0, check="bind", detail=f"{target} is seen" if code == 0 else err.strip()[-200:]
    )


def _run(command: Sequence[str]) -> tuple[int, str, str]:
    env = {key: value for key, value in os.environ.items() if not key.startswith("APPTAINERENV_")}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=120, check=False, env=env
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return 1, "", str(error)
    return done.returncode, done.stdout, done.stderr
