"""What lies in a folder that should hold a Hugging Face model, and what to do when it is another.

Imports no torch: submits and ``trainer.plan`` look at the folder as well.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.json_files import parse_object, read_bytes, read_object
from trainer.base.model_files import require_whole_files

KEY = "actor_rollout_ref.model.path"
LFS_START = b"version https://git-lfs.github.com/spec/"
LFS_MAX_BYTES = 1024
"""Longest file that is a Git LFS pointer."""
READ = (".json", ".safetensors", ".jinja", ".txt", ".model")
"""Suffixes of the files that are read. Others may stay pointers: a clone often fetches only these.
"""
OTHER_WEIGHTS = {
    "*.gguf": "GGUF weights, which are quantised for inference: give the original model of "
    "safetensors files",
    "*.onnx": "ONNX weights, which can't be trained: give the original model of safetensors files",
    "*.bin": "weights as pickles (*.bin), which are not loaded since they may run code: convert "
    "them to safetensors with save_pretrained",
    "*.pth": "weights in PyTorch's own format (*.pth): convert them to a Hugging Face folder of "
    "safetensors files",
    "*.pt": "weights in PyTorch's own format (*.pt): convert them to a Hugging Face folder of "
    "safetensors files",
}
"""Files of other formats -> what they are and what to do, for a folder without safetensors."""


def require_no_lfs_pointer(path: Path, key: str) -> None:
    """Raise UserError naming ``key`` when ``path`` is the pointer that a clone without Git LFS has
    in place of a large file.
    """
    try:
        if not path.is_file() or path.stat().st_size > LFS_MAX_BYTES:
            return
    except OSError:
        return
    data = read_bytes(path, LFS_MAX_BYTES)
    if data is not None and data.startswith(LFS_START):
        raise UserError(
            f"{key}: {path} is a Git LFS pointer, not the file itself: type `git lfs pull` in "
            f"{path.parent} (after `git lfs install`), or download the file"
        )


def require_model(folder: Path, key: str = KEY) -> None:
    """Raise UserError when ``folder`` holds no model that can be trained: no config, adapters
    alone, weights of another format, quantised ones, pointers of Git LFS, or damaged files.

    ``key``: the setting that names it.
    """
    for file in sorted(path for path in folder.iterdir() if path.suffix in READ):
        require_no_lfs_pointer(file, key)
    if not (folder / "config.json").is_file():
        raise UserError(f"{key}: {_without_config(folder)}")
    require_unquantised(
        parse_object(read_bytes(folder / "config.json") or b"") or {}, str(folder), key
    )
    require_whole_files(folder, key)
    if any(folder.glob("*.safetensors")):
        return
    for pattern, advice in OTHER_WEIGHTS.items():
        if any(folder.glob(pattern)):
            raise UserError(f"{key}: {folder} has no weights (*.safetensors), but {advice}")
    raise UserError(
        f"{key}: {folder} has no weights (*.safetensors); it holds {_names(folder)}. Copy the "
        "weights there"
    )


def require_unquantised(config: Mapping[str, Any], path: str, key: str = KEY) -> None:
    """Raise UserError when a model's ``config.json`` says that its weights are quantised."""
    quantised = config.get("quantization_config")
    if not quantised:
        return
    method = quantised.get("quant_method") if isinstance(quantised, Mapping) else None
    raise UserError(
        f"{key}: the weights of {path} are quantised ({method or 'quantization_config'} in its "
        "config.json), and training needs them whole: give the model that they were made from, "
        "usually the same name without -GPTQ, -AWQ, -FP8 or the like"
    )


def _without_config(folder: Path) -> str:
    """Why a folder without ``config.json`` is no model."""
    if (folder / "adapter_config.json").is_file():
        base = read_object(folder / "adapter_config.json").get("base_model_name_or_path")
        of = f" of {base}" if isinstance(base, str) and base else ""
        model = base if isinstance(base, str) and base else "the base model"
        return (
            f"{folder} holds adapters (LoRA){of}, and no model: merge them into it first (peft: "
            f"merge_and_unload, then save_pretrained), or give {model} itself"
        )
    for pattern in ("*.gguf", "*.onnx"):
        if any(folder.glob(pattern)):
            return f"{folder} has no config.json, but {OTHER_WEIGHTS[pattern]}"
    inner = sorted(path.parent for path in folder.glob("*/config.json"))
    inner += sorted(path.parent for path in folder.glob("snapshots/*/config.json"))
    hint = f"; did you mean {inner[0]}?" if inner else f"; it holds {_names(folder)}"
    return f"{folder} has no config.json, so it is no Hugging Face model folder{hint}"


def _names(folder: Path) -> str:
    return ", ".join(sorted(f.name for f in folder.iterdir())[:8]) or "nothing"
