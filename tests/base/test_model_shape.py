"""What the cost model reads from a config; no weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from trainer.base.model_shape import ModelShape


def test_dense_config_has_no_experts() -> None:
    shape = ModelShape.from_config(LlamaConfig())
    assert (
        shape.experts,
        shape.experts_per_token,
        shape.moe_ffn,
        shape.shared_experts,
        shape.dense_layers,
    ) == (0,) * 5


def test_qwen3_moe_counts_the_experts_a_token_visits() -> None:
    config = Qwen3MoeConfig(
        num_hidden_layers=4,
        num_experts=16,
        num_experts_per_tok=2,
        moe_intermediate_size=96,
        mlp_only_layers=[0],
    )
    shape = ModelShape.from_config(config)
    assert (shape.experts, shape.experts_per_token, shape.moe_ffn, shape.dense_layers) == (
        16,
        2,
        96,
        1,
    )
    assert shape.active_params < shape.params


def test_mixtral_experts_have_the_width_of_the_dense_layer() -> None:
    config = MixtralConfig(num_local_experts=8, num_experts_per_tok=2)
    shape = ModelShape.from_config(config)
    assert (shape.experts, shape.experts_per_token, shape.moe_ffn) == (
        8,
        2,
        config.intermediate_size,
    )
    assert shape.dense_layers == 0


def test_shared_experts_by_width_or_by_number() -> None:
    qwen = Qwen2MoeConfig(
        num_hidden_layers=4,
        moe_intermediate_size=100,
        shared_expert_intermediate_size=400,
        decoder_sparse_step=2,
    )
    assert (
        ModelShape.from_config(qwen).shared_experts,
        ModelShape.from_config(qwen).dense_layers,
    ) == (4, 2)
    deepseek = DeepseekV3Config(num_hidden_layers=6, n_shared_experts=2, first_k_dense_replace=3)
    assert (
        ModelShape.from_config(deepseek).shared_experts,
        ModelShape.from_config(deepseek).dense_layers,
    ) == (2, 3)


QWEN2_MOE_A2_7B = {
    "hidden_size": 2048,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 5632,
    "vocab_size": 151936,
    "num_experts": 60,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 1408,
    "shared_expert_intermediate_size": 5632,
    "decoder_sparse_step": 1,
    "tie_word_embeddings": False,
}
"""Qwen1.5-MoE-A2.7B: its card says 14.3 B parameters, 2.7 B of them active."""


def test_the_plan_and_the_trainer_read_the_same_size(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN2_MOE_A2_7B))
    planned = ModelShape.from_folder(tmp_path)
    assert planned == ModelShape.from_config(Qwen2MoeConfig(**QWEN2_MOE_A2_7B))
    assert planned.params == pytest.approx(14.316e9, rel=1e-3)
    assert planned.shared_experts == 4
    assert planned.active_params == pytest.approx(2.69e9 - 2048 * 151936, rel=0.05)
