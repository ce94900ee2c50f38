"""A model, its optimizer and DeepSpeed: any number of micro-batches, then one optimizer step with
their exact gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from trainer.parallel.deepspeed_setup import EngineSettings, initialize
from trainer.parallel.host_memory import exclude_from_forks, trim_host_memory
from trainer.ranks.world import World

TRIM_MIN_PARAMETERS = 32_000_000
"""Size of model from which freed host memory is given back before each optimizer step."""


@dataclass(frozen=True)
class StepResult:
    """The result of one optimizer step."""

    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    applied: bool
    """False when the gradient was not finite: the weights are as before."""


class Engine:
    """Trains a model: ``backward`` for each micro-batch, then one ``step``.

    The number of micro-batches may differ from step to step. Every rank calls ``backward`` equally
    often when ``needs_equal_counts`` (ZeRO 2 and 3 synchronise inside it).
    """

    def __init__(self, model: nn.Module, settings: EngineSettings, world: World) -> None:
        self.world = world
        self.settings = settings
        self.ds, self.optimizer = initialize(model, settings)
        self.before_step: Callable[[], None] = lambda: None
        """Called before the weights change: a checkpoint's copy may still be reading them."""
        self._awaits_backward = False
        self._trims_memory = _size(model.parameters()) >= TRIM_MIN_PARAMETERS
        self.num_trained = _size(p for p in model.parameters() if p.requires_grad)
        """Parameters with a gradient, over all ranks."""
        self._num_hidden_states = -1
        """Optimizer states that forked processes don't inherit; -1 before the first time."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model through DeepSpeed. Every pass that is followed by a ``backward`` has to
        call this: ZeRO-3 counts the micro-batches of a step here, and otherwise keeps only the last
        one's gradient.
        """
        self._awaits_backward = True
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

        ``loss`` [] is already divided by the *global* normaliser; DeepSpeed averages over ranks,
        which is undone here.
        """
        if not self._awaits_backward:
            raise RuntimeError(
                "backward without Engine.forward before it: ZeRO-3 would lose a micro-batch"
            )
        self._awaits_backward = False
        self.ds.backward(loss * self.world.size, scale_wrt_gas=False)

    def step(self, *, lr: float, max_norm: float) -> StepResult:
        """Take one optimizer step with the gradient of all micro-batches since the last one.

        ``max_norm``: the global norm to which the gradient is clipped; 0 for none.
        """
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.before_step()
        self.trim_memory()
        if self.settings.guarded:
            self.optimizer.max_norm = max_norm
            self.ds.step()
            norm = self.optimizer.grad_norm
        else:
            self.ds.optimizer.clip_grad = max_norm
            self.ds.step()
            norm = float(self.ds.get_global_grad_norm())
        self.hide_from_forks()
        applied = bool(self.ds.was_step_applied())
        return StepResult(norm if applied else float("nan"), applied)

    def hide_from_forks(self) -> None:
        """Keep weights and optimizer state out of processes that are forked later, which need none
        of them.

        Call it before the first fork, once a checkpoint's optimizer state is there; ``step`` calls
        it for new state.
        """
        inner = self.optimizer if self.settings.guarded else self.ds.optimizer.optimizer
        if len(inner.state) == self._num_hidden_states:
            return
        self._num_hidden_states = len(inner.state)
        tensors: list[Tensor] = list(self.module.parameters())
        for group in inner.param_groups:
            tensors += group["params"]
        for state in inner.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
        exclude_from_forks(tensor.detach() for tensor in tensors)

    def discard_gradients(self) -> None:
        """Forget the gradients gathered since the last step."""
        self._awaits_backward = False
        if self.settings.zero_stage:
            self.ds.optimizer.zero_grad()
        else:
            self.ds.zero_grad()

    def synchronize(self) -> None:
        """Wait for the device's queued work, so that a clock read next includes it."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)

    def release_memory(self) -> None:
        """Give cached blocks back to the device or the machine, after running out of memory."""
        self._awaits_backward = False
        if self.world.device.type == "cuda":
            torch.cuda.empty_cache()
        else:
            self.trim_memory()

    def trim_memory(self) -> None:
        """Give freed host memory back if the model is large: allocating it again takes time too."""
        if self._trims_memory:
            trim_host_memory()

    @contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        """The module with all weights present, also under ZeRO-3, to be read only: for generation
        and export.
        """
        if self.settings.zero_stage < 3:
            yield self.module
            return
        with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
            yield self.module


def _size(parameters: Iterator[nn.Parameter]) -> int:
    """Elements of ``parameters``; of all shards under ZeRO-3."""
    return sum(int(getattr(p, "ds_numel", p.numel())) for p in parameters)
