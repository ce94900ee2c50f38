"""The shape of a model from its ``config.json``, without loading it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.batching.cost import ModelShape


def folder_of(path: str) -> Path | None:
    """The folder of a local model, a built-in one, or a hub model that was downloaded before; None:
    not here.
    """
    if path.startswith("builtin:"):
        try:
            from trainer.models import resolve
        except ImportError:
            return None
        return Path(resolve(path))
    local = Path(path).expanduser()
    if local.is_dir():
        return local
    hub = Path(
        os.environ.get("HF_HUB_CACHE")
        or Path(os.environ.get("HF_HOME") or "~/.cache/huggingface") / "hub"
    )
    found = hub.expanduser().glob(f"models--{path.replace('/', '--')}/snapshots/*/config.json")
    return max(
        (file.parent for file in found), key=lambda folder: folder.stat().st_mtime, default=None
    )


def shape_of(folder: Path) -> ModelShape:
    """Raises UserError when ``config.json`` is missing or isn't a decoder's."""
    file = folder / "config.json"
    try:
        config: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        heads = config["num_attention_heads"]
        return ModelShape(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            ffn=config["intermediate_size"],
            vocab=config["vocab_size"],
            head_dim=config.get("head_dim") or 0,
            experts=_first(config, "num_experts", "num_local_experts", "n_routed_experts"),
            experts_per_token=_first(config, "num_experts_per_tok"),
            moe_ffn=_first(config, "moe_intermediate_size"),
            shared_experts=_first(config, "n_shared_experts"),
            dense_layers=_first(config, "first_k_dense_replace"),
            tied=bool(config.get("tie_word_embeddings", False)),
        )
    except OSError as error:
        raise UserError(
            f"actor_rollout_ref.model.path: {file} can't be read ({error.strerror})"
        ) from error
    except (ValueError, KeyError) as error:
        raise UserError(
            f"actor_rollout_ref.model.path: {file} is no config of a decoder (missing {error})"
        ) from error


def _first(config: dict[str, Any], *names: str) -> int:
    return next((int(config[name]) for name in names if config.get(name)), 0)
