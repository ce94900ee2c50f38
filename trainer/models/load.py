"""From ``actor_rollout_ref.model.path`` to a model for packed batches, its tokenizer and shape."""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
)

from trainer.base.errors import UserError, first_line, nearest, typed_line
from trainer.base.home import expanded
from trainer.base.length_limit import require_fits
from trainer.base.model_files import GENERATION, tokenizer_advice
from trainer.base.model_folder import KEY, require_model, require_unquantised
from trainer.base.model_shape import ModelShape
from trainer.models import attention, lora, smollm2, tiny
from trainer.models.cache import cache_root, cached
from trainer.models.head import make_token_head
from trainer.models.huggingface import no_load_reports, no_progress_bars

FAMILIES = ("llama", "qwen2", "qwen3")
"""``model_type`` of the supported families: Llama 2/3 (and SmolLM2), Qwen2 and 2.5, Qwen3."""
BUILTIN_PREFIX = "builtin:"
BUILTIN = ("tiny", "smollm2")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model ready for :func:`trainer.models.token_stats` and for ``generate``."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    shape: ModelShape
    source: str
    """Folder or hub id that the weights came from."""
    base_digest: str | None = None
    """Digest of the base weights, which stay as they are while adapters are trained; None when all
    weights are trained.
    """

    @property
    def has_adapters(self) -> bool:
        """Whether only adapters (LoRA) are trained."""
        return self.base_digest is not None

    def require_positions(self, prompt: int, response: int) -> None:
        """Raise UserError when ``prompt`` and ``response`` tokens exceed the model's positions."""
        positions = getattr(self.model.config, "max_position_embeddings", None)
        require_fits(
            prompt,
            response,
            positions if isinstance(positions, int) else None,
            limited_by=f"{self.source} (max_position_embeddings)",
        )


def load_model(
    path: str,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    gradient_checkpointing: bool = False,
    cache_dir: str | os.PathLike[str] | None = None,
    adapters: lora.Lora | None = None,
) -> LoadedModel:
    """Load ``path``: a Hugging Face folder, a hub id, ``builtin:tiny`` or ``builtin:smollm2``. With
    ``adapters`` only these are trained.

    Raises :class:`UserError` for a folder that is missing or has no weights, an unknown built-in
    name, a family that is not supported, a tokenizer that doesn't fit the model and an adapter for
    a layer that it doesn't have.
    """
    attention.register()
    source = resolve(path, cache_dir)
    config = model_config(source, path)
    tokenizer = load_tokenizer(source, path)
    require_fitting_tokenizer(tokenizer, config.vocab_size, path)
    _require_generation_config(source, path)
    model = _weights(source, path, config, dtype)
    prepare_model(model)
    base_digest = None
    if adapters is not None:
        base_digest = lora.digest(model)
        lora.add_adapters(model, adapters)
    if gradient_checkpointing:
        model.gradient_checkpointing_enable(  # type: ignore[operator]
            gradient_checkpointing_kwargs={"use_reentrant": False}
        )
    return LoadedModel(
        model.to(device).train(),
        tokenizer,
        ModelShape.from_config(config),
        str(source),
        base_digest,
    )


def prepare_model(model: nn.Module) -> nn.Module:
    """Give a transformers causal language model the packed attention and the head that
    :func:`token_stats` needs, and an embedding that trains all of its rows.
    """
    attention.register()
    model.set_attn_implementation(attention.NAME)  # type: ignore[operator]
    # transformers sets it to the pad token, whose row then gets no gradient: the pad token is often
    # also the end token, which is trained, and nothing is padded here.
    model.get_input_embeddings().padding_idx = None  # type: ignore[operator]
    make_token_head(model.get_output_embeddings())  # type: ignore[operator]
    return model


def make_builtin(path: str | None) -> None:
    """Make the built-in model ``path`` if the cache lacks it; other paths need nothing.

    To be called before there is a process group. Raises UserError for an unknown built-in name and
    a cache that can't be written.
    """
    if path is not None and path.startswith(BUILTIN_PREFIX):
        resolve(path)


def resolve(path: str, cache_dir: str | os.PathLike[str] | None = None, *, key: str = KEY) -> str:
    """The folder (or hub id) of ``path``; makes a built-in model on its first use. ``key``: the
    setting that holds it.

    Raises UserError for a path that is no model folder, hub id or built-in model.
    """
    if path.startswith(BUILTIN_PREFIX):
        name = path.removeprefix(BUILTIN_PREFIX)
        root = cache_root(cache_dir)
        if name == "tiny":
            with no_progress_bars():
                return str(cached(root, name, tiny.recipe(), tiny.build))
        if name == "smollm2":
            with no_progress_bars():
                return str(cached(root, name, smollm2.RECIPE, smollm2.build))
        known = " and ".join(f"builtin:{n}" for n in BUILTIN)
        raise UserError(
            f"{key}: no built-in model {path!r}{nearest(name, BUILTIN)}. There are {known}"
        )
    folder = expanded(path)
    if folder.is_dir():
        require_model(folder, key)
        return str(folder)
    if folder.exists():
        raise UserError(
            f"{key}: {path} is a file; give the folder that holds config.json and the weights"
        )
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise UserError(
            f"{key}: there is no folder {path}. Give a Hugging Face folder, a hub id such as "
            "Qwen/Qwen2.5-0.5B-Instruct, or builtin:tiny"
        )
    return path


def load_tokenizer(source: str, path: str, *, key: str = KEY) -> PreTrainedTokenizerBase:
    """The tokenizer of a resolved ``source``; ``path`` is what the user typed at ``key``.

    A missing pad token becomes the end token. Raises UserError for a tokenizer that can't be loaded
    or has no end token.
    """
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            source, trust_remote_code=False
        )
    except Exception as e:  # its files may hold anything, and the library raises what follows
        _refuse_remote_code(e, path, key)
        raise UserError(
            f"{key}: {path} has no usable tokenizer ({typed_line(e)}): "
            f"{tokenizer_advice(Path(source))}"
        ) from e
    if tokenizer.eos_token_id is None:
        raise UserError(
            f"{key}: the tokenizer of {path} has no end token (eos_token), so generation would "
            "never stop: set it in its tokenizer_config.json, or copy that file anew"
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def require_fitting_tokenizer(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, path: str, *, key: str = KEY
) -> None:
    """Raise UserError when ``tokenizer`` has ids past the model's ``vocabulary``."""
    if len(tokenizer) > vocabulary:
        raise UserError(
            f"{key}: the tokenizer of {path} has {len(tokenizer)} tokens, more than the model's "
            f"vocabulary of {vocabulary}: give the tokenizer it was trained with, or resize "
            "its embeddings (model.resize_token_embeddings) and save it again"
        )


def _refuse_remote_code(error: Exception, path: str, key: str) -> None:
    """Raise UserError when ``error`` says that the model needs its own code.

    Without ``trust_remote_code=False`` transformers would ask on the terminal, and run the code of
    whoever made the model when the answer is yes.
    """
    if "trust_remote_code" in str(error):
        raise UserError(
            f"{key}: {path} needs Python code that comes with it (auto_map), which is never run "
            "(actor_rollout_ref.model.trust_remote_code=false): give a model of the families "
            f"{', '.join(FAMILIES)} with a tokenizer of transformers itself"
        ) from error


def model_config(source: str, path: str, *, key: str = KEY) -> Any:
    """The config of a resolved ``source``. Raises UserError for a model that can't be trained."""
    try:
        config = AutoConfig.from_pretrained(source, trust_remote_code=False)
    except Exception as e:  # it may hold anything, and the library raises what follows
        _refuse_remote_code(e, path, key)
        raise UserError(
            f"{key}: cannot read the model config of {path} (config.json): {typed_line(e)}"
        ) from e
    require_unquantised(config.to_dict(), path, key)
    if config.model_type not in FAMILIES:
        raise UserError(
            f"{key}: {path} is of the family {config.model_type!r}; supported are "
            f"{', '.join(FAMILIES)} (Llama, Qwen2, Qwen2.5, Qwen3)"
        )
    if "sliding_attention" in (getattr(config, "layer_types", None) or []):
        raise UserError(
            f"{key}: {path} uses sliding-window attention, which packed batches don't support"
        )
    if getattr(config, "attention_dropout", 0.0):
        raise UserError(
            f"{key}: {path} has attention_dropout; set it to 0 in its config.json: policy ratios "
            "need none"
        )
    return config


def _require_generation_config(source: str, path: str) -> None:
    """Its end tokens are those of the rollouts. Raises UserError for one that can't be used."""
    try:
        GenerationConfig.from_pretrained(source, trust_remote_code=False)
    except OSError:
        return  # there is none
    except Exception as e:  # it may hold anything, and the library raises what follows
        raise UserError(f"{KEY}: cannot use {GENERATION} of {path}: {typed_line(e)}") from e


def _weights(source: str, path: str, config: Any, dtype: torch.dtype) -> nn.Module:
    return load_weights(AutoModelForCausalLM, source, path, config, dtype)[0]


def load_weights(
    auto_class: Any,
    source: str,
    path: str,
    config: Any,
    dtype: torch.dtype,
    *,
    key: str = KEY,
    head: Collection[str] = (),
) -> tuple[nn.Module, set[str]]:
    """The model of ``auto_class``, and which parameters of its ``head`` the weights lack: these
    hold random numbers.

    Raises UserError for weights that can't be loaded, lack others, or have a head of another shape.
    """
    try:
        with no_load_reports():
            model, report = auto_class.from_pretrained(
                source,
                config=config,
                dtype=dtype,
                attn_implementation=attention.NAME,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
                ignore_mismatched_sizes=bool(head),
            )
    except (OSError, ValueError, SafetensorError, RuntimeError) as e:
        _refuse_remote_code(e, path, key)
        raise UserError(f"{key}: cannot load the weights of {path}: {first_line(e)}") from e
    for name, saved, wanted in report["mismatched_keys"]:
        raise UserError(
            f"{key}: {name} of {path} has the shape {list(saved)} where {list(wanted)} is needed: "
            "give a model without a head, or with one of a single output (num_labels=1)"
        )
    absent = set(report["missing_keys"])
    missing = sorted(absent - set(head))
    if missing:
        # transformers would fill them with random numbers and go on.
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise UserError(
            f"{key}: the weights of {path} lack {', '.join(missing[:3])}{more}; the copy is "
            "incomplete"
        )
    return model, absent
