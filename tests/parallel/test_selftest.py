"""The start-up self-test passes on a sound engine and stops every way of losing micro-batches that
we know of.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.parallel.ranks import ROOT

LOSES = {"key dropped": {1, 2}, "past DeepSpeed": {3}, "averaged": {0, 1, 2, 3}}
"""Stages at which a mutant really loses something."""


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.parallel.mutants", str(tmp_path_factory.mktemp("run"))],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    return dict(json.loads(run.stdout.splitlines()[-1]))


@pytest.mark.parametrize("zero", range(4))
def test_sound_engines_pass(verdicts: dict[str, str], zero: int) -> None:
    assert float(verdicts[f"sound {zero}"]) < 1e-6


@pytest.mark.parametrize("mutant", LOSES)
@pytest.mark.parametrize("zero", range(4))
def test_a_lost_micro_batch_stops_the_run(verdicts: dict[str, str], mutant: str, zero: int) -> None:
    text = verdicts[f"{mutant} {zero}"]
    assert text.startswith("self-test: ") == (zero in LOSES[mutant]), text
