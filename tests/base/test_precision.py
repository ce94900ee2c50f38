"""A bf16 run on a processor that only emulates it takes hours; a user of `auto` never gets one."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.base.precision import planned_precision, resolve_precision


@pytest.mark.parametrize(
    ("flags", "on_gpu", "found"),
    [
        ("flags : fpu avx2 fma", False, "fp32"),
        ("flags : fpu avx512_bf16", False, "bf16"),
        ("flags : fpu amx_bf16 amx_tile", False, "bf16"),
        ("flags : fpu avx2", True, "bf16"),
        ("", False, "fp32"),
    ],
)
def test_auto_follows_the_hardware(tmp_path: Path, flags: str, on_gpu: bool, found: str) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(flags + "\n")
    assert resolve_precision("auto", on_gpu=on_gpu, cpuinfo=cpuinfo) == found


def test_what_is_asked_for_is_what_runs(tmp_path: Path) -> None:
    assert resolve_precision("bf16", on_gpu=False, cpuinfo=tmp_path / "none") == "bf16"
    assert resolve_precision("fp32", on_gpu=True) == "fp32"
    assert resolve_precision("auto", on_gpu=False, cpuinfo=tmp_path / "none") == "fp32"
    assert (planned_precision("auto"), planned_precision("fp32")) == ("bf16", "fp32")
