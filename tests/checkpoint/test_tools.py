"""Others' tools on our folders: DeepSpeed's consolidation and universal conversion, and the export
for transformers.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.zygote import Zygote


@pytest.mark.parametrize("program", ["deepspeed_tools", "export"])
def test_weights_come_out_as_the_engine_holds_them(
    zygote: Zygote, tmp_path: Path, program: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ranks = zygote.start(
        f"tests.checkpoint.tools:{program}",
        2,
        [str(run), str(tmp_path / "store")],
        tmp_path / "log",
    )
    ranks.finish()
