"""A full, broken or dead disk, or a dead writer, costs one checkpoint and an error in log and metric, nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.zygote import Zygote


@pytest.mark.parametrize("fault", ["ENOSPC", "EDQUOT", "EIO", "EROFS", "die", "hang"])
def test_training_goes_on(zygote: Zygote, tmp_path: Path, fault: str) -> None:
    run, note = tmp_path / "run", tmp_path / "fault"
    run.mkdir()
    ranks = zygote.start(
        "tests.checkpoint.programs:faults", 2, [str(run), str(tmp_path / "store"), fault], tmp_path / "log",
        env={"PLIMSOLL_FAULT": str(note)},
    )  # fmt: skip
    ranks.finish(60)
