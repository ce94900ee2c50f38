"""The data files that a run was started with (``RUN/data_files.json``): all attempts read those."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.errors import UserError
from trainer.base.full_disk import WAIT_S
from trainer.base.json_files import read_object
from trainer.config.frozen import has_started
from trainer.data import Dataset, FileDataset
from trainer.data.dataset import DataFile
from trainer.ranks.agreement import agreed
from trainer.ranks.world import World

FILE = "data_files.json"
HOW_TO_GO_ON = (
    "Put back the file that the run was started with, or begin a run in a new "
    "trainer.default_local_dir. Changed validation data alone are taken with "
    "trainer.accept_changed_files=true"
)


def check_data_files(
    run_dir: Path, world: World, datasets: Sequence[Dataset | None], *, accept: bool
) -> None:
    """Record the files of ``datasets``, or compare them with those that the run was started with.
    Collective.

    ``accept``: other files become those of the run; a checkpoint still refuses other training data.
    Raises UserError, on all ranks, for a file that differs, and when ranks read different ones.
    """
    files = [
        file for dataset in datasets if isinstance(dataset, FileDataset) for file in dataset.files()
    ]
    contents = world.gather([(file.key, file.digest) for file in files])
    with agreed(world):
        if any(other != contents[0] for other in contents):
            raise UserError(
                f"ranks read different data ({', '.join(file.path for file in files)}): some node "
                "has another file under that name. Give all nodes the same one"
            )
        if world.is_main:
            _compare_or_record(run_dir, files, accept=accept)


def _compare_or_record(run_dir: Path, files: Sequence[DataFile], *, accept: bool) -> None:
    path = run_dir / FILE
    recorded = read_object(path).get("files")
    if isinstance(recorded, list) and has_started(run_dir) and not accept:
        problems = differences(recorded, files)
        if problems:
            raise UserError(f"{'; '.join(problems)}. {HOW_TO_GO_ON}")
    atomic.write_json(path, {"files": [asdict(file) for file in files]}, wait_s=WAIT_S)


def differences(recorded: Sequence[Mapping[str, Any]], files: Sequence[DataFile]) -> list[str]:
    """A message for each of ``files`` that isn't the recorded one in its place."""
    problems = []
    for key in sorted({file.key for file in files}):
        before = [entry for entry in recorded if entry.get("key") == key]
        now = [file for file in files if file.key == key]
        if len(before) != len(now):
            problems.append(
                f"{key} names {len(now)} file(s), the run was started with {len(before)}"
            )
            continue
        for entry, file in zip(before, now, strict=True):
            if entry.get("digest") != file.digest:
                problems.append(_difference(entry, file))
    return problems


def _difference(entry: Mapping[str, Any], file: DataFile) -> str:
    what = f"{entry.get('size')} bytes then, {file.size} now"
    if entry.get("size") == file.size:
        what = f"other content in as many bytes ({file.size})"
    written = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(file.mtime_ns / 1e9))
    return (
        f"{file.key}: {file.path} is not what the run was started with: {what}; last written "
        f"{written}"
    )
