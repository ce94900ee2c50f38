"""A model of the hub is found where transformers keeps it."""

from __future__ import annotations

from pathlib import Path

import pytest

from trainer.plan.model import folder_of

VARIABLES = ("HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME")


@pytest.mark.parametrize(
    ("variable", "below"),
    [
        ("HF_HUB_CACHE", "."),
        ("HF_HOME", "hub"),
        ("XDG_CACHE_HOME", "huggingface/hub"),
        ("HOME", ".cache/huggingface/hub"),
    ],
)
def test_a_downloaded_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, below: str
) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv(variable, str(tmp_path / "place"))
    assert folder_of("org/name") is None
    snapshot = tmp_path / "place" / below / "models--org--name/snapshots/0abc"
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    assert folder_of("org/name") == snapshot
