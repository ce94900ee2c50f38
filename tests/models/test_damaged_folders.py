"""A damaged model folder ends in one message that names the file and what to do."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.base.errors import UserError
from trainer.models import load_model, resolve

INDEX = "model.safetensors.index.json"
SHARD = "model-00001-of-00001.safetensors"
OBJECTS = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", INDEX),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A whole model, with every file that one may have."""
    model = tmp_path / "model"
    shutil.copytree(resolve("builtin:tiny"), model, ignore=shutil.ignore_patterns("plimsoll*"))
    (model / "model.safetensors").rename(model / SHARD)
    names = header(model / SHARD)
    index = {"metadata": {}, "weight_map": {name: SHARD for name in names if name[0] != "_"}}
    (model / INDEX).write_text(json.dumps(index))
    end = json.loads((model / "tokenizer_config.json").read_text())["eos_token"]
    (model / "special_tokens_map.json").write_text(json.dumps({"eos_token": end}))
    (model / "added_tokens.json").write_text("{}")
    return model


def header(weights: Path) -> dict[str, Any]:
    data = weights.read_bytes()
    values: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return values


def load(model: Path) -> None:
    load_model(str(model), dtype=torch.float32, device="cpu")


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def test_the_whole_folder_loads(folder: Path) -> None:
    load(folder)


@pytest.mark.parametrize("name", OBJECTS)
def test_a_file_that_is_no_whole_object(folder: Path, name: str) -> None:
    whole = (folder / name).read_bytes()
    half = whole.rstrip()[:-1]
    for data in (half, b"", bytes(len(whole)), b"[1, 2]", b"\xff" + whole, b"[" * 100_000):
        (folder / name).write_bytes(data)
        with pytest.raises(UserError, match=rf"model\.path: .*/{name} is no .*: copy it anew from"):
            load(folder)


@pytest.mark.parametrize("name", [n for n in OBJECTS if n not in ("added_tokens.json", INDEX)])
@pytest.mark.parametrize("value", [-3, "x", None, [[]], {"a": {}}], ids=str)
def test_an_object_with_other_values_loads_or_is_named(
    folder: Path, name: str, value: object
) -> None:
    """What transformers can do without may load; nothing else than a message comes otherwise."""
    rewrite(folder / name, lambda values: dict.fromkeys(values, value))
    try:
        load(folder)
    except UserError as error:
        assert name in str(error) or "eos_token" in str(error)
        assert "actor_rollout_ref.model.path" in str(error)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("config.json", lambda v: {}, r"cannot read the model config of .* \(config\.json\)"),
        (
            "generation_config.json",
            lambda v: {**v, "pad_token_id": "x"},
            r"cannot use generation_config\.json of .*TypeError",
        ),
        (
            "tokenizer.json",
            lambda v: {"a": 1},
            r"no usable tokenizer .* its files \(tok",
        ),
        ("tokenizer_config.json", lambda v: dict.fromkeys(v, 7), "no usable tokenizer"),
        ("tokenizer_config.json", lambda v: {}, r"set it in its tokenizer_config\.json"),
        ("added_tokens.json", lambda v: {"a": "b", "c": None}, "no usable tokenizer"),
        (INDEX, lambda v: {}, r"index\.json lists no weights"),
        (INDEX, lambda v: {"weight_map": [1]}, r"index\.json lists no weights"),
        (INDEX, lambda v: {"weight_map": {"a": 1}}, r"index\.json names weights in other places"),
        (INDEX, lambda v: {"weight_map": {"a": "../b"}}, r"names weights in other places"),
        (INDEX, lambda v: {"weight_map": {"a": "b.safetensors"}}, r"has no b\.safetensors, which"),
    ],
)
def test_what_is_wrong_in_a_file(
    folder: Path, name: str, change: Callable[[Any], Any], message: str
) -> None:
    if name == "tokenizer_config.json":
        (folder / "special_tokens_map.json").unlink()
    rewrite(folder / name, change)
    with pytest.raises(UserError, match=message):
        load(folder)


def test_a_tokenizer_without_its_vocabulary(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"no usable tokenizer .*: copy tokenizer\.json, which"):
        load(folder)


def test_weights_that_were_cut(folder: Path) -> None:
    data = (folder / SHARD).read_bytes()
    for most, message in (
        (len(data) - 1, rf"{SHARD} has {len(data) - 1} bytes where its header says {len(data)}"),
        (100, f"{SHARD} is no safetensors file, or was cut short"),
        (0, f"{SHARD} is no safetensors file, or was cut short"),
    ):
        (folder / SHARD).write_bytes(data[:most])
        with pytest.raises(UserError, match=rf"{message}.*: copy it anew"):
            load(folder)
    (folder / SHARD).unlink()
    (folder / "other.safetensors").write_bytes(data)
    with pytest.raises(UserError, match=rf"has no {SHARD}, which {INDEX} lists"):
        load(folder)
