"""The runs that words on a command line mean: sweeps and runs of the ledger, run folders that no
ledger knows, folders that hold runs, patterns of folders, and W&B ids.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from jobs import ledger
from jobs.ledger import LOCAL, SUBMITTED, Entry
from jobs.view.select import is_named, select
from trainer.base.errors import UserError, nearest
from trainer.base.json_files import read_object
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.run_folder import WANDB_IDENTITY, last_attempt, log_folder, read_json

RUN_FILES = (METRICS_FILE, "config.yaml", "job.json")
"""A folder that has one of them is a run."""
PATTERN_LETTERS = "*?["
"""A word with one of them is a pattern of folders."""


def find_runs(path: Path, words: Sequence[str]) -> list[Entry]:
    """The runs that any of ``words`` names, each once; all of the ledger ``path`` without words.

    Raises UserError for a word that names no run, and for a ledger that holds none when no word
    was given.
    """
    known = ledger.read(path)
    if not words:
        _require_runs(path, known)
        return select(known, [])
    by_ledger = [word for word in words if any(is_named(entry, word) for entry in known)]
    found = select(known, by_ledger) if by_ledger else []
    by_folder = {os.path.realpath(entry.run): entry for entry in known}
    for word in words:
        if word in by_ledger:
            continue
        folders = _folders(word)
        entries = [by_folder.get(os.path.realpath(one)) or folder_entry(one) for one in folders]
        if not entries:
            entries = _by_wandb_id(word, known)
        if not entries:
            raise UserError(_unknown(word, path, known))
        found += entries
    return _distinct_names(_once(found))


def folder_entry(run: Path) -> Entry:
    """The run in a folder that the ledger doesn't know."""
    begin = read_json(log_folder(run, last_attempt(run)) / "begin.json")
    return Entry(
        name=run.name,
        sweep="",
        run=str(run),
        signature="",
        overrides=(),
        shape="",
        gpus=0,
        launch=str(begin.get("launch") or ""),
        phase=SUBMITTED,
        job=str(begin.get("job") or LOCAL),
    )


def is_run(folder: Path) -> bool:
    """Whether a folder holds a run."""
    return any((folder / name).is_file() for name in RUN_FILES)


def _folders(word: str) -> list[Path]:
    """The run folders of a word: the folder itself, the runs in it, or those of a pattern."""
    if any(letter in word for letter in PATTERN_LETTERS):
        named = [Path(name).absolute() for name in sorted(glob.glob(word))]
    else:
        named = [Path(word).absolute()]
    folders = []
    for folder in named:
        if is_run(folder):
            folders.append(folder)
        elif folder.is_dir():
            inside = sorted(folder.iterdir(), key=_order)
            folders += [one for one in inside if one.is_dir() and is_run(one)]
    return folders


def _order(folder: Path) -> tuple[int, str]:
    number = int(folder.name) if folder.name.isdecimal() else -1
    return number, folder.name


def _by_wandb_id(word: str, known: Sequence[Entry]) -> list[Entry]:
    """Runs of the ledger, and those beside them or in ``runs``, whose W&B id is ``word``."""
    if not word.isalnum():
        return []
    folders = {Path(entry.run) for entry in known}
    around = {folder.parent for folder in folders} | {Path("runs").absolute()}
    beside = {one for folder in around if folder.is_dir() for one in folder.iterdir()}
    by_folder = {Path(entry.run): entry for entry in known}
    return [
        by_folder.get(folder) or folder_entry(folder)
        for folder in sorted(folders | beside)
        if read_object(folder / WANDB_IDENTITY).get("id") == word
    ]


def _once(entries: Iterable[Entry]) -> list[Entry]:
    return list({os.path.realpath(entry.run): entry for entry in entries}.values())


def _distinct_names(entries: Sequence[Entry]) -> list[Entry]:
    """Two folders of one name are called by as much of their paths as tells them apart."""
    names = [entry.name for entry in entries]
    distinct = []
    for entry in entries:
        name = entry.name
        if names.count(name) > 1 and len(entries) < 1000:
            name = os.path.relpath(entry.run)
        distinct.append(replace(entry, name=name))
    return distinct


def _require_runs(path: Path, known: Sequence[Entry]) -> None:
    if known:
        return
    problem = f"isn't there (looked from {Path.cwd()})"
    if path.exists():
        problem = "holds no runs"
    raise UserError(
        f"the ledger {path} {problem}; name run folders, e.g. 'runs/*', or another ledger with "
        "--ledger or PLIMSOLL_LEDGER."
    )


def _unknown(word: str, path: Path, known: Sequence[Entry]) -> str:
    if Path(word).is_dir():
        return (
            f"the folder {word} is no run and holds none: a run has one of {', '.join(RUN_FILES)}."
        )
    if not known and not path.exists():
        return (
            f"'{word}' is no run folder and no W&B id, and the ledger {path} isn't there (looked "
            f"from {Path.cwd()}); name another one with --ledger or PLIMSOLL_LEDGER."
        )
    hint = nearest(word, [name for e in known for name in (e.name, e.sweep)]) or ";"
    return (
        f"'{word}' names no run of the ledger{hint} see python -m jobs status. It is no run "
        "folder, pattern or W&B id either."
    )
