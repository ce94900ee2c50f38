"""DeepSpeed's configuration, and a DeepSpeed engine around a model and its optimizer."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import nn

from trainer.base.precision import resolve_precision
from trainer.config.schema import Actor, Config
from trainer.parallel.adamw import GuardedAdamW

# Its Muon optimizer has functions compiled, which would load all of torch's compiler: 1.5 s and 70
# MB of each rank.
_compile = torch.compile
torch.compile = lambda f=None, **_: f if f else (lambda g: g)  # type: ignore[assignment]
try:
    import deepspeed.runtime.zero.muon.original_muon
finally:
    torch.compile = _compile
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it sets its own level when imported

BUCKET_ELEMENTS = 50_000_000
"""Elements of one collective: enough for a link's full speed, 100 MB in bf16. DeepSpeed's default
of 500 million takes 2 GB of every rank's memory while gradients are reduced.
"""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Settings of the optimizer and the sharding."""

    zero_stage: int
    """0: everything on every rank; 1: optimizer state sharded; 2: and gradients; 3: and weights."""
    bf16: bool
    """Weights and activations in bfloat16 with a float32 master copy; otherwise float32."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    offload_optimizer: bool = False
    offload_param: bool = False

    @classmethod
    def of_actor(cls, actor: Actor, device: torch.device) -> EngineSettings:
        """From ``actor_rollout_ref.actor``; ``device`` decides what ``mixed_precision=auto`` is."""
        return cls(
            zero_stage=actor.zero_stage,
            bf16=resolve_precision(actor.mixed_precision, on_gpu=device.type == "cuda") == "bf16",
            betas=(actor.optim.betas[0], actor.optim.betas[1]),
            eps=actor.optim.eps,
            weight_decay=actor.optim.weight_decay,
            offload_optimizer=actor.optimizer_offload,
            offload_param=actor.param_offload,
        )

    @classmethod
    def of_critic(cls, config: Config, device: torch.device) -> EngineSettings:
        """From ``critic``, in the actor's precision."""
        critic = config.critic
        wanted = config.actor_rollout_ref.actor.mixed_precision
        return cls(
            zero_stage=critic.zero_stage,
            bf16=resolve_precision(wanted, on_gpu=device.type == "cuda") == "bf16",
            betas=(critic.optim.betas[0], critic.optim.betas[1]),
            eps=critic.optim.eps,
            weight_decay=critic.optim.weight_decay,
            offload_optimizer=critic.optimizer_offload,
            offload_param=critic.param_offload,
        )

    @property
    def guarded(self) -> bool:
        """Whether the optimizer is ``GuardedAdamW``."""
        return self.zero_stage == 0 and not self.bf16


def initialize(model: nn.Module, settings: EngineSettings) -> tuple[Any, Any]:
    """The DeepSpeed engine of ``model`` and its optimizer."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    decayed = [parameter for parameter in trained if parameter.ndim >= 2]
    not_decayed = [parameter for parameter in trained if parameter.ndim < 2]
    groups = [
        {"params": decayed, "weight_decay": settings.weight_decay},
        {"params": not_decayed, "weight_decay": 0.0},
    ]
    optimizer_class = GuardedAdamW if settings.guarded else torch.optim.AdamW
    _skip_compilation()
    # Fused: one pass over memory. The plain form makes temporaries as large as a shard of the
    # model, several at a time.
    optimizer = optimizer_class(
        [group for group in groups if group["params"]],
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    engine, wrapped_optimizer, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=ds_config(settings),
        dist_init_required=False,
    )
    return engine, optimizer if settings.guarded else wrapped_optimizer


def ds_config(settings: EngineSettings) -> dict[str, Any]:
    """DeepSpeed's configuration.

    Clipping is set for each step by ``Engine.step``: DeepSpeed's default of 1.0 never applies.
    """
    zero: dict[str, Any] = {
        "stage": settings.zero_stage,
        "overlap_comm": False,
        "reduce_bucket_size": BUCKET_ELEMENTS,
        "allgather_bucket_size": BUCKET_ELEMENTS,
    }
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.offload_param:
        zero["offload_param"] = {"device": "cpu", "pin_memory": torch.cuda.is_available()}
    if settings.zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = 0
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        # Every backward accumulates and step() is the boundary. Without this key DeepSpeed 0.18.9
        # and later keep only the last micro-batch's gradient under ZeRO 1 and 2; the start-up
        # self-test proves that it works.
        "managed_gradient_accumulation": False,
        "gradient_clipping": 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "bf16": {"enabled": settings.bf16},
        "data_types": {"grad_accum_dtype": "fp32"} if settings.bf16 else {},
        "steps_per_print": 10**9,
        "wall_clock_breakdown": False,
    }


def _skip_compilation() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce on a CPU.

    Only its inference engine calls it, yet it is built when the first engine starts: a minute and 3
    GB of two compilers, under a lock that a killed build leaves behind for ever.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
