"""A full, broken, slow or dead disk, or a dead writer, costs checkpoints and an error in log and
metric, no more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.gate import GATE
from tests.checkpoint.test_power_cut import save
from tests.checkpoint.zygote import Zygote
from trainer.checkpoint.store import commit
from trainer.checkpoint.store.disk import Disk

ERRORS = [
    f"{error} {operation}"
    for error, operations in {
        "ENOSPC": ("mkdir", "write", "fsync"),
        "EDQUOT": ("write", "rename"),
        "EIO": ("write", "fsync", "fsync_dir"),
        "EROFS": ("mkdir", "rename"),
        "ESTALE": ("write", "fsync", "rename"),
    }.items()
    for operation in operations
]


@pytest.fixture
def home(memory: Path, request: pytest.FixtureRequest) -> Path:
    folder = memory / request.node.name
    folder.mkdir()
    return folder


def ranks_run(zygote: Zygote, home: Path, program: str, *args: Any) -> str:
    """What two ranks logged."""
    run = home / "run"
    run.mkdir()
    ranks = zygote.start(
        f"tests.checkpoint.programs:{program}",
        2,
        [str(run), str(home / "store"), *args],
        home / "log",
        env={"PLIMSOLL_FAULT": str(home / "fault"), GATE: str(home / "gate")},
    )
    ranks.finish()
    return ranks.log.read_text()


@pytest.mark.parametrize("faults", [ERRORS, ["die", "hang"]], ids=["errors", "writer"])
def test_training_goes_on(zygote: Zygote, home: Path, faults: list[str]) -> None:
    output = ranks_run(zygote, home, "faults", faults)
    for words in (
        ("No space left", "Stale file handle")
        if faults == ERRORS
        else ("exit code -9", "longer than 2 s")
    ):
        assert words in output, output


class Repeated(Disk):
    """NFS: the answer to a rename was lost, its repetition finds nothing to rename."""

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        super().rename(old, new)


def test_a_rename_whose_answer_was_lost_is_done(tmp_path: Path) -> None:
    save(Repeated(), tmp_path, 1, latest=False)
    assert commit.steps_on_disk(tmp_path) == [1]


def test_a_slow_disk_puts_saves_off_and_stops_nothing(zygote: Zygote, home: Path) -> None:
    ranks_run(zygote, home, "slow")


def test_damage_in_any_file_sends_all_ranks_to_the_one_before(zygote: Zygote, home: Path) -> None:
    ranks_run(zygote, home, "damaged")


def test_names_that_come_late_are_no_damage(zygote: Zygote, home: Path) -> None:
    ranks_run(zygote, home, "late", str(home / "view"))
