"""Folders and files that are not what they seem: each gets one message with what to do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trainer.base.data_files import expand
from trainer.base.errors import UserError
from trainer.base.home import expanded
from trainer.base.model_folder import require_model

POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 269060552\n"
QUANTISED = json.dumps({"model_type": "llama", "quantization_config": {"quant_method": "gptq"}})
ADAPTERS = json.dumps({"base_model_name_or_path": "Qwen/Qwen2.5-0.5B"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"config.json": "{}", "model.safetensors": POINTER}, "Git LFS pointer.*git lfs pull"),
        ({"config.json": "{}", "tokenizer.json": POINTER}, r"tokenizer\.json is a Git LFS pointer"),
        ({"config.json": QUANTISED, "model.safetensors": "x"}, "quantised.*gptq.*without -GPTQ"),
        (
            {"adapter_config.json": ADAPTERS, "adapter_model.safetensors": "x"},
            "adapters.*of Qwen/Qwen2.5-0.5B.*merge",
        ),
        ({"adapter_config.json": "{", "adapter_model.safetensors": "x"}, "give the base model"),
        ({"config.json": "{}", "pytorch_model.bin": "x"}, "pickles.*save_pretrained"),
        ({"model-Q4.gguf": "x"}, "no config.json, but GGUF"),
        ({"config.json": "{}", "model.onnx": "x"}, "ONNX.*can't be trained"),
        ({"config.json": "{}", "consolidated.00.pth": "x"}, "Hugging Face folder"),
        ({"inner/config.json": "{}"}, "did you mean .*inner"),
        ({"notes.txt": "x"}, "no Hugging Face model folder; it holds notes.txt"),
        ({}, "it holds nothing"),
    ],
)
def test_a_folder_that_holds_no_model_says_what_it_holds(
    tmp_path: Path, files: dict[str, str], message: str
) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    with pytest.raises(UserError, match=message) as error:
        require_model(tmp_path)
    assert "actor_rollout_ref.model.path" in str(error.value) and "\n" not in str(error.value)


def test_a_whole_model_passes(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"quantization_config": null}')
    header = b'{"a": {"dtype": "U8", "shape": [2000], "data_offsets": [0, 2000]}}'
    weights = len(header).to_bytes(8, "little") + header + b"x" * 2000
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "pytorch_model.bin").write_text(POINTER)  # not fetched, and not needed
    require_model(tmp_path)


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet"])
def test_a_data_file_that_is_a_pointer_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_text(POINTER)
    with pytest.raises(UserError, match=r"data\.train_files.*git lfs pull"):
        expand(str(tmp_path / name), "data.train_files")


def test_a_user_without_home_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", no_home)
    with pytest.raises(UserError, match="set HOME, or set PLIMSOLL_CACHE"):
        expanded("~/.cache", "set PLIMSOLL_CACHE")
