"""The folders in which libraries keep what they compile or fetch, for users whose home can't be
written: read-only, full, of another user, or none at all, as inside an image.

Each library has a variable of its own for its folder. Where one that a run writes to can't be
written, the run's own folder, which is private and can be, takes its place. Standard library only:
it comes before torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from trainer.base.errors import UserError

FOLDER = "caches"
"""In the run folder."""
PROBE_BYTES = 4096
"""Written to see whether a disk takes anything."""


def prepare(run_dir: Path, env: MutableMapping[str, str] | None = None) -> None:
    """Set the variable of each cache that can't be written to a folder in ``run_dir``, and say so
    once. Call it before the libraries are imported.

    Raises UserError when no folder for temporary files can be written.
    """
    env = os.environ if env is None else env
    require_temporary(env)
    instead = run_dir.absolute() / FOLDER
    moved = replacements(env, instead)
    if not moved:
        return
    env.update({name: str(folder) for name, (folder, _) in moved.items()})
    reasons = dict.fromkeys(reason for _, reason in moved.values())
    sys.stderr.write(
        f"[WARNING] {'; '.join(reasons)}: caches of libraries are kept in {instead} "
        f"instead. To keep them for other runs, set {', '.join(moved)} to folders that you can "
        "write to.\n"
    )


def replacements(env: Mapping[str, str], instead: Path) -> dict[str, tuple[Path, str]]:
    """Variable -> the folder in ``instead`` to set it to, and what is wrong with its own."""
    moved = {}
    for name, place in places(env).items():
        if name == "HF_HOME" and place.is_dir():
            continue  # models that others keep there are read
        reason = unwritable(place)
        if reason is not None:
            moved[name] = (instead / name.lower(), reason)
    return moved


def places(env: Mapping[str, str]) -> dict[str, Path]:
    """Variable -> the folder that its library writes to: the variable's, or its default."""
    home = Path(env.get("HOME") or os.path.expanduser("~"))  # which stays ~ for who has none
    cache = Path(env.get("XDG_CACHE_HOME") or home / ".cache")
    config = Path(env.get("XDG_CONFIG_HOME") or home / ".config")
    data = Path(env.get("XDG_DATA_HOME") or home / ".local/share")
    triton = Path(env.get("TRITON_HOME") or home)
    defaults = {
        "XDG_CACHE_HOME": cache,
        "HF_HOME": cache / "huggingface",
        "TORCH_EXTENSIONS_DIR": cache / "torch_extensions",
        "TRITON_CACHE_DIR": triton / ".triton/cache",
        "VLLM_CACHE_ROOT": cache / "vllm",
        "FLASHINFER_WORKSPACE_BASE": home,
        "MPLCONFIGDIR": config / "matplotlib",
        "WANDB_CACHE_DIR": cache / "wandb",
        "WANDB_DATA_DIR": data / "wandb",
    }
    return {name: Path(env.get(name) or default) for name, default in defaults.items()}


def unwritable(folder: Path) -> str | None:
    """Why nothing can be written in ``folder``, or made where it will be; None when it can."""
    if folder.parts[:1] == ("~",):
        return "this user has no home folder"
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryFile(dir=existing) as file:
            file.write(bytes(PROBE_BYTES))
    except OSError as error:
        return f"{existing} can't be written ({error.strerror})"
    return None


def require_temporary(env: Mapping[str, str]) -> None:
    """Raise UserError when the folder for temporary files can't be written. Libraries keep sockets
    there, for whose names the run folder's may be too long.
    """
    named = env.get("TMPDIR")
    if named:
        reason = unwritable(Path(named))
        if reason is None and not Path(named).is_dir():
            reason = f"{named} is no folder"
        if reason is not None:
            raise UserError(f"TMPDIR={named}: {reason}; set TMPDIR to a folder that can be written")
        return
    try:
        tempfile.gettempdir()
    except OSError as error:
        raise UserError(
            f"no folder for temporary files can be written ({error.strerror}): free space in /tmp, "
            "or set TMPDIR to a folder that can be"
        ) from error
