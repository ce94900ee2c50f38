"""A full, broken, slow or dead disk, or a dead writer, costs checkpoints, never the training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fork_server import ForkServer
from tests.checkpoint.gate_disk import GATE
from tests.checkpoint.test_power_cut import save
from trainer.checkpoint.store import layout
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


def run_on_two_ranks(fork_server: ForkServer, home: Path, program: str, *args: Any) -> str:
    """Run ``program`` on two ranks. Returns their log."""
    run = home / "run"
    run.mkdir()
    ranks = fork_server.start(
        f"tests.checkpoint.rank_programs:{program}",
        2,
        [str(run), str(home / "store"), *args],
        home / "log",
        env={"PLIMSOLL_FAULT": str(home / "fault"), GATE: str(home / "gate")},
    )
    ranks.finish()
    return ranks.log.read_text()


@pytest.mark.parametrize("faults", [ERRORS, ["die", "hang"]], ids=["errors", "writer"])
def test_training_goes_on(fork_server: ForkServer, home: Path, faults: list[str]) -> None:
    output = run_on_two_ranks(fork_server, home, "faults", faults)
    messages = ("exit code -9", "longer than 2 s")
    if faults == ERRORS:
        messages = ("No space left", "Stale file handle")
    for message in messages:
        assert message in output, output


class RepeatingDisk(Disk):
    """NFS: the answer to a rename was lost, its repetition finds nothing to rename."""

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        super().rename(old, new)


def test_a_rename_whose_answer_was_lost_is_done(tmp_path: Path) -> None:
    save(RepeatingDisk(), tmp_path, 1, latest=False)
    assert layout.steps_on_disk(tmp_path) == [1]


def test_a_slow_disk_postpones_saves_and_stops_nothing(fork_server: ForkServer, home: Path) -> None:
    run_on_two_ranks(fork_server, home, "slow")


def test_damage_in_any_file_sends_all_ranks_to_the_one_before(
    fork_server: ForkServer, home: Path
) -> None:
    run_on_two_ranks(fork_server, home, "damaged")


def test_names_that_appear_late_are_no_damage(fork_server: ForkServer, home: Path) -> None:
    run_on_two_ranks(fork_server, home, "late", str(home / "view"))
