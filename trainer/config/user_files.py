"""Files of the user that act on what is learnt (a reward, an agent, a chat template): the run
folder keeps the copies that it was started with, and every attempt runs those.

``RUN/user/files.json`` names for each key the copy that counts, with its digest;
``RUN/user/NAME-DIGEST/`` holds it. Copies that were replaced stay.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel

from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json
from trainer.base.user_code import MODULES_FOLDER, SOURCE_FILE, modules_beside
from trainer.config.keys import dotted
from trainer.config.keys.fields import marked
from trainer.config.schema import Config
from trainer.config.schema.markers import UserFile

FOLDER = "user"
MANIFEST = "files.json"
ACCEPT = "trainer.accept_changed_files"
_Model = TypeVar("_Model", bound=BaseModel)


@dataclass(frozen=True)
class Contents:
    """A user's file, and for code the modules beside it, as they are now."""

    key: str
    source: Path
    """Absolute."""
    parts: dict[str, bytes]
    """Path in the copy's folder -> contents; the file itself comes first."""

    @property
    def digests(self) -> dict[str, str]:
        """SHA-256 of each part."""
        return {name: hashlib.sha256(data).hexdigest() for name, data in self.parts.items()}

    @property
    def digest(self) -> str:
        """``sha256:...`` of all parts with their names."""
        return digest_of(self.digests)


def digest_of(digests: dict[str, str]) -> str:
    """``sha256:...`` over the names and digests of a copy's parts."""
    text = "".join(f"{name}\0{digest}\n" for name, digest in sorted(digests.items()))
    return f"sha256:{hashlib.sha256(text.encode()).hexdigest()}"


def paths_of(config: Config) -> dict[str, Path]:
    """Key -> absolute path of each file of the user that ``config`` names and that exists."""
    values = config.model_dump()
    found = {}
    for key, marker in marked(UserFile):
        path = user_path(dotted.get(values, key), marker)
        if path is not None:
            found[key] = path
    return found


def is_template(value: str | None) -> bool:
    """Whether ``data.chat_template`` is a Jinja text, not the path of a file."""
    return value is not None and ("{" in value or "\n" in value)


def user_path(value: Any, marker: UserFile) -> Path | None:
    """The absolute path in a key's value; None for none, a text of its own or a missing file."""
    if not isinstance(value, str) or (not marker.code and is_template(value)):
        return None
    path = Path(os.path.abspath(os.path.expanduser(value)))
    try:
        return path if path.is_file() else None
    except (OSError, ValueError):  # no name of a file
        return None


def read_contents(config: Config) -> list[Contents]:
    """The files of the user, read now. Raises UserError for one that can't be read or is no
    Python.
    """
    code = {key for key, marker in marked(UserFile) if marker.code}
    return [_read(key, path, key in code) for key, path in paths_of(config).items()]


def _read(key: str, path: Path, code: bool) -> Contents:
    parts = {path.name: path}
    if code:
        beside = modules_beside(path, key=key)
        parts |= {f"{MODULES_FOLDER}/{name}": module for name, module in beside.items()}
    try:
        return Contents(key, path, {name: part.read_bytes() for name, part in parts.items()})
    except OSError as error:
        raise UserError(f"{key}: {error.filename} can't be read ({error.strerror})") from error


def file_digests(files: Iterable[Contents]) -> dict[str, str]:
    """Key -> digest."""
    return {one.key: one.digest for one in files}


def recorded_digests(run_dir: Path) -> dict[str, str]:
    """Key -> digest of the copies that a run folder holds."""
    return {key: str(entry["digest"]) for key, entry in _manifest(run_dir).items()}


def freeze_files(files: Iterable[Contents], run_dir: Path, *, started: bool, accept: bool) -> None:
    """Keep copies of ``files`` in the run folder.

    ``started``: the run has been trained already; then a file that differs from its copy is taken
    only with ``accept``. Raises UserError, which names the file and what differs.
    """
    manifest = _manifest(run_dir)
    now = {one.key: one for one in files}
    changed = [
        (one, manifest[one.key])
        for one in now.values()
        if one.key in manifest and manifest[one.key]["digest"] != one.digest
    ]
    if started and changed and not accept:
        raise UserError("\n".join(_difference(one, entry, run_dir) for one, entry in changed))
    kept = manifest if started else {}
    written = dict(kept)
    for key, one in now.items():
        if key not in kept or kept[key]["digest"] != one.digest:
            written[key] = _write(one, run_dir, kept.get(key))
    if started:
        for one, entry in changed:
            sys.stdout.write(
                f"{one.key}: goes on with {one.source}, {_parts(one, entry)} changed\n"
            )
    if written != manifest:
        atomic.write_json(run_dir / FOLDER / MANIFEST, written)


def _write(one: Contents, run_dir: Path, before: dict[str, Any] | None) -> dict[str, Any]:
    """Write a copy; its line of the manifest."""
    name = f"{one.key.replace('.', '_')}-{one.digest.removeprefix('sha256:')[:12]}"
    folder = run_dir / FOLDER / name
    for part, data in {**one.parts, SOURCE_FILE: str(one.source).encode()}.items():
        path = folder / part
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_bytes(path, data, durable=False)
    entry = {
        "source": str(one.source),
        "folder": name,
        "file": one.source.name,
        "parts": one.digests,
        "digest": one.digest,
    }
    if before is not None:
        entry["replaced"] = [*before.get("replaced", []), before["digest"]]
    return entry


def use_frozen(config: Config, run_dir: Path) -> Config:
    """``config`` with the paths of the run folder's copies.

    Raises UserError for a copy that is not what was frozen.
    """
    values = config.model_dump()
    markers = dict(marked(UserFile))
    for key, entry in _manifest(run_dir).items():
        if key not in markers or not isinstance(dotted.get(values, key), str):
            continue
        folder = run_dir / FOLDER / str(entry["folder"])
        for part, digest in entry["parts"].items():
            if _digest_of_file(folder / part) != digest:
                raise UserError(
                    f"{folder / part} was changed since the run was started; it is a copy of "
                    f"{entry['source']} ({key}). Change that one, and type {ACCEPT}=true"
                )
        config = _replaced(config, key.split("."), str(folder / str(entry["file"])))
    return config


def _manifest(run_dir: Path) -> dict[str, Any]:
    return read_json(run_dir / FOLDER / MANIFEST)


def _digest_of_file(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return "missing"


def _replaced(model: _Model, path: list[str], value: str) -> _Model:
    """A copy of ``model`` with another value at ``path``."""
    if len(path) > 1:
        return model.model_copy(
            update={path[0]: _replaced(getattr(model, path[0]), path[1:], value)}
        )
    return model.model_copy(update={path[0]: value})


def _parts(one: Contents, entry: dict[str, Any]) -> str:
    """Names of the parts that differ from a copy."""
    before: dict[str, str] = entry["parts"]
    now = one.digests
    differing = sorted(n for n in {*before, *now} if before.get(n) != now.get(n))
    return ", ".join(name.removeprefix(f"{MODULES_FOLDER}/") for name in differing)


def _difference(one: Contents, entry: dict[str, Any], run_dir: Path) -> str:
    return (
        f"{one.key}={one.source}: {_parts(one, entry)} changed since the run in {run_dir} was "
        f"started. Its copy is in {run_dir / FOLDER / str(entry['folder'])}. Type {ACCEPT}=true to "
        "go on with the new one, or set another trainer.experiment_name to start anew"
    )
