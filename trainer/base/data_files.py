"""From ``data.train_files`` to a list of files."""

from __future__ import annotations

import glob
import os
import re
from pathlib import Path

from trainer.base.errors import UserError, nearest
from trainer.base.home import expanded
from trainer.base.model_folder import require_no_lfs_pointer

SUFFIXES = (".jsonl", ".ndjson", ".json", ".parquet", ".arrow")
_SKIPPED = {"dataset_info.json", "state.json", "dataset_dict.json"}
"""Files that ``datasets`` writes next to its tables."""
SPLITS = {
    "train": ("train", "training"),
    "validation": ("validation", "valid", "val", "dev"),
    "test": ("test", "testing", "eval", "evaluation"),
}
"""Words in a file's name that say which split it holds, as ``datasets`` reads them."""


def expand(patterns: str | list[str], key: str) -> list[Path]:
    """Files that ``patterns`` (files, folders, globs) name, in order; those of a folder or glob
    sorted by name.

    Of a folder whose files are named after splits (``train-*``, ``test-*``),
    ``data.train_files`` takes those of training, and another ``key`` those of validation or, if
    there are none, of test.

    Raises UserError naming ``key`` when something is missing, unreadable or of an unknown type, and
    when files of several splits are meant of which the right ones can't be told.
    """
    files: list[Path] = []
    for pattern in [patterns] if isinstance(patterns, str) else patterns:
        path = expanded(pattern)
        if path.is_dir():
            files += _files_of_folder(path, key)
        elif path.exists():
            files.append(path)
        elif glob.has_magic(str(path)):
            matches = sorted(Path(p) for p in glob.glob(str(path), recursive=True))
            if not matches:
                raise UserError(f"{key}: no file matches {path}")
            found = [p for p in matches if p.is_file()]
            if len(_by_split(found)) > 1:
                raise _several_splits(f"{path} matches", found, key)
            files += found
        else:
            raise UserError(f"{key}: there is no file {path}{_nearest_file(path)}")
    for path in files:
        _require_readable(path, key)
    repeated = {str(p) for p in files if files.count(p) > 1}
    if repeated:
        raise UserError(f"{key}: named more than once: {', '.join(sorted(repeated))}")
    return files


def _files_of_folder(folder: Path, key: str) -> list[Path]:
    files = sorted(p for p in folder.iterdir() if p.suffix in SUFFIXES and p.name not in _SKIPPED)
    if files:
        return _files_of_split(files, folder, key)
    folders = sorted(p.name for p in folder.iterdir() if p.is_dir())
    hint = f"; it has the folders {', '.join(folders)}: name one of them" if folders else ""
    raise UserError(f"{key}: the folder {folder} has no {'/'.join(SUFFIXES)} file{hint}")


def split_of(path: Path) -> str | None:
    """The split that a file's name mentions as a word of its own; None for none or several."""
    words = set(re.split(r"[-._ 0-9]+", path.stem.lower()))
    found = [split for split, names in SPLITS.items() if words & set(names)]
    return found[0] if len(found) == 1 else None


def _by_split(files: list[Path]) -> dict[str | None, list[Path]]:
    splits: dict[str | None, list[Path]] = {}
    for file in files:
        splits.setdefault(split_of(file), []).append(file)
    return splits


def _files_of_split(files: list[Path], folder: Path, key: str) -> list[Path]:
    """Those of the files of ``folder`` that belong to the split that ``key`` reads; all of them
    when they are of one split or of none.
    """
    splits = _by_split(files)
    if len(splits) == 1:
        return files
    wanted = ("train",) if key == "data.train_files" else ("validation", "test")
    there = [split for split in wanted if split in splits]
    if len(there) != 1 or None in splits:
        raise _several_splits(f"the folder {folder} holds", files, key)
    return splits[there[0]]


def _several_splits(where: str, files: list[Path], key: str) -> UserError:
    counts = [
        f"{len(part)} of {split or 'no split'} ({part[0].name})"
        for split, part in _by_split(files).items()
    ]
    return UserError(f"{key}: {where} files of several splits: {', '.join(counts)}; name the files")


def _require_readable(path: Path, key: str) -> None:
    if path.suffix not in SUFFIXES:
        raise UserError(
            f"{key}: {path} is not one of {', '.join(SUFFIXES)}; convert it or name another file"
        )
    if not os.access(path, os.R_OK):
        raise UserError(f"{key}: no permission to read {path}")
    require_no_lfs_pointer(path, key)


def _nearest_file(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; the folder {folder} does not exist either (the current folder is {Path.cwd()})"
    names = sorted(p.name for p in folder.iterdir() if p.suffix in SUFFIXES)
    hint = nearest(path.name, names)
    return hint or (f"; {folder} holds {', '.join(names[:8])}" if names else "")
