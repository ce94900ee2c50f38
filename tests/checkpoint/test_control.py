"""What a real checkpointer keeps of what it saved, and what it says of itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.zygote import Zygote
from tests.tracking.documented import undocumented
from trainer.checkpoint.metrics import Numbers


@pytest.mark.parametrize("program", ["keep_best", "numbers"])
def test_one_rank(zygote: Zygote, tmp_path: Path, program: str) -> None:
    (tmp_path / "run").mkdir()
    zygote.start(
        f"tests.checkpoint.control:{program}",
        1,
        [str(tmp_path / "run"), str(tmp_path / "store")],
        tmp_path / "log",
        env={"PLIMSOLL_GATE": str(tmp_path / "gate")},
    ).finish()


@pytest.mark.parametrize("program", ["read_only", "beside"])
def test_two_ranks(zygote: Zygote, tmp_path: Path, program: str) -> None:
    (tmp_path / "fault").write_text("EROFS mkdir")
    (tmp_path / "run").mkdir()
    zygote.start(
        f"tests.checkpoint.control:{program}",
        2,
        [str(tmp_path / "run"), str(tmp_path / "store")],
        tmp_path / "log",
        env={"PLIMSOLL_FAULT": str(tmp_path / "fault")},
    ).finish()


def test_every_number_is_explained() -> None:
    made = Numbers()
    made.put(copy_s=1.0)
    made.add("skipped")
    made.committed(3, nbytes=10, seconds=2.0)
    assert undocumented(set(made.take(1))) == set()
