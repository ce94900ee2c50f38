"""The numbers of a decoder-only transformer that decide its size and cost, read from its config.

Imports no torch: ``trainer.plan`` reads a ``config.json`` on the login node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.base.json_files import parse_object, read_regular
from trainer.base.model_folder import KEY, require_no_lfs_pointer

FIELDS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "intermediate_size",
    "vocab_size",
    "head_dim",
    "tie_word_embeddings",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "moe_intermediate_size",
    "n_shared_experts",
    "shared_expert_intermediate_size",
    "first_k_dense_replace",
    "mlp_only_layers",
    "decoder_sparse_step",
)
"""Fields of a config that are read, where it has them."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The numbers of a decoder-only transformer that decide its cost. All sizes are counts of
    features or layers.
    """

    hidden: int
    """Width of the residual stream."""
    layers: int
    """Decoder layers."""
    heads: int
    """Query heads."""
    kv_heads: int
    """Key/value heads; fewer than ``heads`` under grouped-query attention."""
    ffn: int
    """Width of the dense feed-forward layer (three matrices, gated)."""
    vocab: int
    """Rows of the output projection."""
    head_dim: int = 0
    """Features of a head; 0 means ``hidden / heads``."""
    experts: int = 0
    """Experts of a layer; 0 for a dense model."""
    experts_per_token: int = 0
    """Experts that one token visits."""
    moe_ffn: int = 0
    """Width of one expert; 0 means ``ffn``."""
    shared_experts: int = 0
    """Experts that every token visits besides the routed ones."""
    dense_layers: int = 0
    """Layers of a mixture-of-experts model that keep the dense feed-forward layer."""
    tied: bool = False
    """Output projection shared with the embedding. Saves memory, not operations."""

    def of_values(self) -> ModelShape:
        """The same model with a head of one output in place of the output projection."""
        return replace(self, tied=True)

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def linear_params_per_layer(self) -> tuple[int, int]:
        """Weights that one token is multiplied with in a dense and in a mixture-of-experts
        layer.
        """
        if not self.experts:
            return self._dense_layer_params, self._dense_layer_params
        visited = self.experts_per_token + self.shared_experts
        return self._dense_layer_params, self._moe_layer_params(visited)

    @property
    def active_params(self) -> int:
        """Weights that take part in the products of one token: with the output projection, without
        the embedding lookup.
        """
        dense, moe = self.linear_params_per_layer
        return self._params_of_layers(dense, moe) + self.hidden * self.vocab

    @property
    def params(self) -> int:
        """All weights of the products and the embedding, without norms and biases."""
        moe = self._moe_layer_params(self.experts + self.shared_experts)
        embeddings = self.hidden * self.vocab * (1 if self.tied else 2)
        return self._params_of_layers(self._dense_layer_params, moe) + embeddings

    @property
    def _attention_params(self) -> int:
        queries = self.heads * self.head_size
        keys = self.kv_heads * self.head_size
        return self.hidden * (queries + 2 * keys) + queries * self.hidden

    @property
    def _dense_layer_params(self) -> int:
        return self._attention_params + 3 * self.hidden * self.ffn

    def _moe_layer_params(self, experts: int) -> int:
        """Weights of a layer with so many experts, its router included."""
        router = self.hidden * self.experts
        return (
            self._attention_params + router + 3 * self.hidden * (self.moe_ffn or self.ffn) * experts
        )

    def _params_of_layers(self, dense: int, moe: int) -> int:
        """Weights of all layers from those of one of each kind."""
        dense_layers = min(self.dense_layers, self.layers) if self.experts else self.layers
        return dense_layers * dense + (self.layers - dense_layers) * moe

    @classmethod
    def from_config(cls, config: Any) -> ModelShape:
        """From a transformers config, or from the contents of a ``config.json``.

        Mixture-of-experts fields are read under the names of Mixtral, Qwen2-MoE, Qwen3-MoE and
        DeepSeek. Raises KeyError for a field that every decoder has.
        """
        values = config if isinstance(config, Mapping) else _attributes(config)
        heads = values["num_attention_heads"]
        layers = values["num_hidden_layers"]
        experts = _first_number(values, "num_experts", "num_local_experts", "n_routed_experts")
        shape = cls(
            hidden=values["hidden_size"],
            layers=layers,
            heads=heads,
            kv_heads=values.get("num_key_value_heads") or heads,
            ffn=values["intermediate_size"],
            vocab=values["vocab_size"],
            head_dim=values.get("head_dim") or 0,
            tied=bool(values.get("tie_word_embeddings", False)),
        )
        if not experts:
            return shape
        moe_ffn = _first_number(values, "moe_intermediate_size") or shape.ffn
        shared = _first_number(values, "n_shared_experts")
        if not shared:  # Qwen2-MoE gives the width of one shared expert instead of a number
            shared = _first_number(values, "shared_expert_intermediate_size") // moe_ffn
        return replace(
            shape,
            experts=experts,
            experts_per_token=_first_number(values, "num_experts_per_tok"),
            moe_ffn=moe_ffn,
            shared_experts=shared,
            dense_layers=_dense_layers(values, layers),
        )

    @classmethod
    def from_folder(cls, folder: Path) -> ModelShape:
        """From ``config.json`` in a model folder. Raises UserError when it is missing or not a
        decoder's.
        """
        file = folder / "config.json"
        require_no_lfs_pointer(file, KEY)
        try:
            values = parse_object(read_regular(file))
        except OSError as error:
            raise UserError(f"{KEY}: {file} can't be read ({error.strerror})") from error
        if values is None:
            raise UserError(f"{KEY}: {file} is no JSON object")
        try:
            return cls.from_config(values)
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise UserError(f"{KEY}: {file} is no config of a decoder (missing {error})") from error


def _attributes(config: Any) -> dict[str, Any]:
    """The fields of a transformers config, which may have them under several names."""
    return {name: getattr(config, name) for name in FIELDS if hasattr(config, name)}


def _first_number(values: Mapping[str, Any], *names: str) -> int:
    """The first of the fields that is there and not 0; else 0."""
    for name in names:
        if values.get(name):
            return int(values[name])
    return 0


def _dense_layers(values: Mapping[str, Any], layers: int) -> int:
    """Layers of a mixture of experts that keep the dense feed-forward layer: the first ones
    (DeepSeek), or those that are listed or skipped (Qwen-MoE).
    """
    first = _first_number(values, "first_k_dense_replace")
    listed = set(values.get("mlp_only_layers") or ())
    step = _first_number(values, "decoder_sparse_step") or 1
    return sum(i < first or i in listed or (i + 1) % step != 0 for i in range(layers))
