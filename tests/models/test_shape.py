"""What the cost model reads from a config; no weights."""

from __future__ import annotations

from transformers import (
    DeepseekV3Config,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from trainer.models.load import model_shape


def test_dense_config_has_no_experts() -> None:
    shape = model_shape(LlamaConfig())
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
    shape = model_shape(config)
    assert (shape.experts, shape.experts_per_token, shape.moe_ffn, shape.dense_layers) == (
        16,
        2,
        96,
        1,
    )
    assert shape.active_params < shape.params


def test_mixtral_experts_have_the_width_of_the_dense_layer() -> None:
    config = MixtralConfig(num_local_experts=8, num_experts_per_tok=2)
    shape = model_shape(config)
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
    assert (model_shape(qwen).shared_experts, model_shape(qwen).dense_layers) == (4, 2)
    deepseek = DeepseekV3Config(num_hidden_layers=6, n_shared_experts=2, first_k_dense_replace=3)
    assert (model_shape(deepseek).shared_experts, model_shape(deepseek).dense_layers) == (2, 3)
