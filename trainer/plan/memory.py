"""Predicted memory of one rank by part, and the size of a checkpoint. Pure functions; all sizes in
bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trainer.base.model_shape import ModelShape

LOGITS_CHUNK = 2**25
"""Logits that exist at once, elements (log-probs are computed over chunks of tokens)."""


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """Bytes of one rank on its device by part; ``host`` is in the machine's memory."""

    weights: int
    gradients: int
    optimizer: int
    reference: int
    activations: int
    logits: int
    kv_cache: int
    host: int

    @property
    def held(self) -> int:
        """What stays while another model of the rank trains."""
        return self.weights + self.gradients + self.optimizer + self.reference

    @property
    def training(self) -> int:
        """Peak of an update."""
        return (
            self.weights
            + self.gradients
            + self.optimizer
            + self.reference
            + self.activations
            + self.logits
        )

    @property
    def generation(self) -> int:
        """Peak of generation, which runs when activations and gradients are gone."""
        return self.weights + self.optimizer + self.reference + self.kv_cache


def predict(
    shape: ModelShape,
    *,
    dp: int,
    zero_stage: int,
    precision: Literal["fp32", "bf16"],
    micro_batch_tokens: int,
    recompute: bool,
    reference: bool,
    kv_tokens: int,
    param_offload: bool = False,
    optimizer_offload: bool = False,
    adapters: int = 0,
) -> MemoryEstimate:
    """Memory of a rank.

    ``adapters``: parameters that are trained in place of the model's own (LoRA), whose reference is
    the model itself; 0: all of the model is trained. ``micro_batch_tokens``: tokens of the largest
    micro-batch; ``kv_tokens``: tokens that generation holds at once. bf16 keeps fp32 gradients and
    an fp32 master copy besides Adam's two moments (ZeRO, arXiv 1910.02054, section 3.1, with fp32
    gradients); sharding as in its section 5.
    """
    half = precision == "bf16"
    params = shape.params + adapters
    trained = adapters or shape.params
    width = 2 if half else 4
    master = trained * 4 if half or zero_stage >= 1 else 0
    optimizer = (trained * 8 + master) // (dp if zero_stage >= 1 else 1)
    weights = params * width // (dp if zero_stage >= 3 else 1)
    gradients = trained * 4 // (dp if zero_stage >= 2 else 1)
    host = (optimizer if optimizer_offload else 0) + (weights if param_offload else 0)
    return MemoryEstimate(
        weights=0 if param_offload else weights,
        gradients=0 if optimizer_offload and zero_stage >= 2 else gradients,
        optimizer=0 if optimizer_offload else optimizer,
        reference=params * width if reference and not adapters else 0,
        activations=micro_batch_tokens * activation_bytes(shape, width, recompute=recompute),
        logits=min(LOGITS_CHUNK, micro_batch_tokens * shape.vocab) * 4 * 2,
        kv_cache=kv_tokens * kv_bytes(shape, width),
        host=host,
    )


def activation_bytes(shape: ModelShape, width: int, *, recompute: bool) -> int:
    """Bytes that backward needs of one token, all layers.

    A layer keeps the inputs of its two norms and their outputs (4 hidden), query, key, value and
    the attention's output (no score matrix with varlen attention), and gate, its activation, up and
    their product (4 ffn); counted as in arXiv 2205.05198, section 4.1. With recomputation each
    layer keeps its input only, and one layer is whole at a time.
    """
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    ffn = (
        (shape.moe_ffn or shape.ffn) * (shape.experts_per_token + shape.shared_experts)
        if shape.experts
        else shape.ffn
    )
    layer = width * (4 * shape.hidden + 2 * q + 2 * kv + 4 * ffn)
    return shape.layers * width * shape.hidden + layer if recompute else shape.layers * layer


def kv_bytes(shape: ModelShape, width: int) -> int:
    """Bytes of one token in the key/value cache, all layers."""
    return 2 * shape.layers * shape.kv_heads * shape.head_size * width


def adapter_params(shape: ModelShape, rank: int, targets: str | Sequence[str]) -> int:
    """Parameters of LoRA adapters (``trainer.models.lora``) on layers of these names, or on all.

    0 for rank 0. Experts have none.
    """
    hidden = shape.hidden
    q, kv = shape.heads * shape.head_size, shape.kv_heads * shape.head_size
    mlps = shape.dense_layers if shape.experts else shape.layers
    widths = {  # features in and out, of all layers
        "q_proj": (hidden + q) * shape.layers,
        "k_proj": (hidden + kv) * shape.layers,
        "v_proj": (hidden + kv) * shape.layers,
        "o_proj": (q + hidden) * shape.layers,
        "gate_proj": (hidden + shape.ffn) * mlps,
        "up_proj": (hidden + shape.ffn) * mlps,
        "down_proj": (shape.ffn + hidden) * mlps,
    }
    names = widths if isinstance(targets, str) else set(targets) & set(widths)
    return rank * sum(widths[name] for name in names)


def checkpoint_bytes(
    shape: ModelShape,
    *,
    precision: Literal["fp32", "bf16"],
    zero_stage: int,
    reference: bool = False,
    adapters: int = 0,
) -> int:
    """Bytes of a checkpoint over all ranks.

    Weights, Adam's two moments in fp32 and, where the engine has one, the fp32 master copy.
    ``reference``: whether it holds a reference that follows the policy. ``adapters``: parameters
    that are trained and saved in place of the model's own (LoRA); 0: all of the model is.
    """
    half = precision == "bf16"
    width = 2 if half else 4
    return (adapters or shape.params) * (
        width * (2 if reference else 1) + 8 + (4 if half or zero_stage >= 1 else 0)
    )


def predicted_save_s(num_bytes: int, *, bytes_per_s: float, commit_s: float = 1.0) -> float:
    """Expected seconds of a save, from the beginning of its copy to its commit."""
    return num_bytes / bytes_per_s + commit_s
