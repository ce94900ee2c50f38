"""Other tools on our checkpoints: DeepSpeed's scripts, and the export for transformers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.fork_server import ForkServer


@pytest.mark.parametrize("program", ["deepspeed_tools", "export"])
def test_tools_read_the_weights_that_the_engine_holds(
    fork_server: ForkServer, tmp_path: Path, program: str
) -> None:
    run = tmp_path / "run"
    run.mkdir()
    ranks = fork_server.start(
        f"tests.checkpoint.tool_programs:{program}",
        2,
        [str(run), str(tmp_path / "store")],
        tmp_path / "log",
    )
    ranks.finish()
