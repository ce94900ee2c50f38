"""DeepSpeed behind one small door: any number of micro-batches, then one optimizer step with the
exact gradient.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from trainer.parallel.host_memory import keep_from_children, trim_host_memory
from trainer.ranks.world import World

# Its Muon optimizer has functions compiled, which would load all of torch's compiler: 1.5 s and 70
# MB of each rank.
_compile, torch.compile = torch.compile, lambda f=None, **_: f if f else (lambda g: g)  # type: ignore[assignment]
try:
    import deepspeed.runtime.zero.muon.original_muon
finally:
    torch.compile = _compile
logging.getLogger("DeepSpeed").setLevel(logging.WARNING)  # it sets its own level when imported


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What the optimizer and the sharding need to know."""

    zero_stage: int
    """0: everything on every rank; 1: optimizer state sharded; 2: and gradients; 3: and weights."""
    bf16: bool
    """Weights and activations in bfloat16 with a float32 master copy; otherwise float32."""
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    offload_optimizer: bool = False
    offload_param: bool = False


@dataclass(frozen=True)
class StepResult:
    """What one optimizer step did. ``grad_norm`` is the global L2 norm before clipping."""

    grad_norm: float
    applied: bool
    """False when the gradient was not finite: the weights are as before."""


TRIM_FROM = 32_000_000
"""Parameters from which freed host memory is given back before each optimizer step."""
BUCKET = 50_000_000
"""Elements of one collective: enough for a link's full speed, 100 MB in bf16."""


class GuardedAdamW(torch.optim.AdamW):
    """AdamW for ZeRO stage 0 in float32, where DeepSpeed reports no gradient norm and steps on a
    non-finite one.
    """

    max_norm: float = 0.0
    grad_norm: float = 0.0
    overflow: bool = False

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Clip to ``max_norm`` (0: don't) and step; leave the weights alone when the norm is not
        finite.
        """
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        self.grad_norm = float(norm)
        self.overflow = not math.isfinite(self.grad_norm)
        if self.overflow:
            return
        if self.max_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(params, self.max_norm, norm)
        super().step(closure)


class Engine:
    """A model, its optimizer and DeepSpeed. K times ``backward``, then one ``step``; K may differ
    from step to step.

    Every rank calls ``backward`` equally often when ``needs_equal_counts`` (ZeRO 2 and 3
    synchronise inside it).
    """

    def __init__(self, model: nn.Module, settings: EngineSettings, world: World) -> None:
        self.world = world
        self.settings = settings
        self._guarded = settings.zero_stage == 0 and not settings.bf16
        self.ds, self.optimizer = _initialize(model, settings, guarded=self._guarded)
        self.before_step: Callable[[], None] = lambda: None
        """Called before the weights change: a checkpoint's copy may still be reading them."""
        self._open = 0  # forward passes whose backward is still to come
        self._large = (
            sum(getattr(p, "ds_numel", p.numel()) for p in model.parameters()) >= TRIM_FROM
        )
        self.trained = sum(
            getattr(p, "ds_numel", p.numel()) for p in model.parameters() if p.requires_grad
        )
        """Parameters with a gradient, over all ranks."""
        self._private = -1  # states of the optimizer that worker processes don't inherit

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The model through DeepSpeed. Passes that will see a ``backward`` have to go this way:
        ZeRO-3 counts the micro-batches of a step here, and keeps only the last one's gradient when
        it isn't told of them.
        """
        self._open = 1
        return self.ds(*args, **kwargs)

    @property
    def module(self) -> nn.Module:
        """The model itself, for passes without gradients."""
        module: nn.Module = self.ds.module
        return module

    @property
    def needs_equal_counts(self) -> bool:
        """True when every rank must run the same number of micro-batches."""
        return self.settings.zero_stage >= 2

    def backward(self, loss: Tensor) -> None:
        """Add the gradient of this micro-batch's share of the step's loss.

        ``loss`` is already divided by the *global* normaliser; DeepSpeed averages over ranks, which
        is undone here.
        """
        if not self._open:
            raise RuntimeError(
                "backward without Engine.forward before it: ZeRO-3 would lose a micro-batch"
            )
        self._open = 0
        self.ds.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self, *, lr: float, max_norm: float) -> StepResult:
        """One optimizer step over everything since the last: clip the global norm to ``max_norm``
        (0: don't).
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.before_step()
        self.trim()
        if self._guarded:
            self.optimizer.max_norm = max_norm
            self.ds.step()
            norm = self.optimizer.grad_norm
        else:
            self.ds.optimizer.clip_grad = max_norm
            self.ds.step()
            norm = float(self.ds.get_global_grad_norm())
        self.keep_private()
        applied = bool(self.ds.was_step_applied())
        return StepResult(norm if applied else float("nan"), applied)

    def keep_private(self) -> None:
        """Weights, masters and moments, as soon as they are there: a worker that is forked needs
        none of them. Call it before the first one is forked, when a checkpoint's moments are there;
        ``step`` does so for new ones.
        """
        inner = self.optimizer if self._guarded else self.ds.optimizer.optimizer
        if len(inner.state) != self._private:
            self._private = len(inner.state)
            held = [p for group in inner.param_groups for p in group["params"]]
            states = [
                v for state in inner.state.values() for v in state.values() if isinstance(v, Tensor)
            ]
            keep_from_children(t.detach() for t in [*self.module.parameters(), *held, *states])

    def discard(self) -> None:
        """Forget the gradients gathered since the last step."""
        self._open = 0
        self.ds.optimizer.zero_grad() if self.settings.zero_stage else self.ds.zero_grad()

    def wait(self) -> None:
        """Until the device has done what was asked of it, so that a clock read next tells the
        truth.
        """
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def release_memory(self) -> None:
        """Give cached blocks back to the device or the machine, after running out of memory."""
        self._open = 0
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self.trim()

    def trim(self) -> None:
        """Give freed host memory back, where the model is so large that it counts: taking it again
        costs time too.
        """
        if self._large:
            trim_host_memory()

    @contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """The module with all weights present, also under ZeRO-3: for generation and export. Read
        only.
        """
        if self.settings.zero_stage < 3:
            yield self.module
            return
        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            yield self.module


def ds_config(settings: EngineSettings, *, guarded: bool) -> dict[str, Any]:
    """DeepSpeed's configuration. Clipping is set for each step by ``Engine.step``: its default of
    1.0 never applies.
    """
    # DeepSpeed's own buckets hold 500 million elements: 2 GB of every rank's memory while gradients
    # are reduced.
    buckets = {"reduce_bucket_size": BUCKET, "allgather_bucket_size": BUCKET}
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": False, **buckets}
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


def _initialize(model: nn.Module, settings: EngineSettings, *, guarded: bool) -> tuple[Any, Any]:
    decay = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    plain = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [
        {"params": decay, "weight_decay": settings.weight_decay},
        {"params": plain, "weight_decay": 0.0},
    ]
    kind = GuardedAdamW if guarded else torch.optim.AdamW
    _without_compiling()
    # Fused: one pass over memory. The plain form makes temporaries as large as a shard of the
    # model, several at a time.
    optimizer = kind(
        [g for g in groups if g["params"]],
        lr=0.0,
        betas=settings.betas,
        eps=settings.eps,
        fused=True,
    )
    engine, wrapped, _, _ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        config=ds_config(settings, guarded=guarded),
        dist_init_required=False,
    )
    return engine, optimizer if guarded else wrapped


def _without_compiling() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce on a CPU.

    Only its inference engine calls it, yet it is built when the first engine starts: a minute and 3
    GB of two compilers, under a lock that a killed build leaves behind for ever.
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
