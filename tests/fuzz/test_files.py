"""Damaged files: one message that names the file, an exit code that docs name, and an end."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from tests.fuzz import child
from tests.fuzz.cases import Case
from tests.fuzz.files import damages, uses, write_all
from tests.fuzz.test_command_lines import problem_of


def _cases(folder: Path, count: int, seed: int) -> list[tuple[str, str, Case]]:
    every = [
        (file, damage, case)
        for file, cases in uses(folder).items()
        for damage in damages()
        for case in cases
    ]
    return random.Random(seed).sample(every, count)


@pytest.mark.parametrize(
    ("count", "seed"),
    [(8, 3), pytest.param(500, 4, marks=pytest.mark.exhaustive)],
    ids=["short", "long"],
)
def test_damaged_files(fake: Path, tmp_path: Path, count: int, seed: int) -> None:
    child.preload()
    good = tmp_path / "good"
    used = tmp_path / "used"
    good.mkdir()
    write_all(good)
    book = good / "ledger.jsonl"
    book.write_text(book.read_text().replace(str(good), str(used)))
    draw = random.Random(seed)
    wrong = []
    for file, damage, case in _cases(used, count, seed):
        shutil.rmtree(used, ignore_errors=True)
        shutil.copytree(good, used)
        damages()[damage](used / file, draw)
        environment = {"HOME": str(tmp_path)}
        ended = child.run(case.command, case.argv, tmp_path, environment, tmp_path)
        problem = problem_of(case, ended)
        if problem:
            wrong.append(
                f"{problem}: {file} {damage}: {case.command} {case.argv!r}\n{ended.err[-900:]}"
            )
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n\n".join(wrong)
