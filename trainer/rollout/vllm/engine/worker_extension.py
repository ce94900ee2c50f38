"""Methods added to vLLM's worker: it takes the trainer's weights and samples as the trainer does.

vLLM mixes :class:`Extension` into its worker class; the methods are called by name through
``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.rollout.vllm.engine import cpu_weights, multi_token, sampler
from trainer.rollout.vllm.engine.cpu_kernels import use_cpu_kernels
from trainer.rollout.vllm.engine.shared_weights import SharedWeightsReader


class Extension:
    """Base class that vLLM gives its worker."""

    model_runner: Any

    def plimsoll_prepare(self) -> None:
        """Replace vLLM's sampler and, where possible on a CPU, its kernels."""
        self._plimsoll_reader = SharedWeightsReader()
        sampler.patch_model_runner(self.model_runner)
        multi_token.patch_model_runner(self.model_runner)
        model = self.model_runner.get_model()
        if cpu_weights.can_pack(model):
            use_cpu_kernels(model)
            cpu_weights.skip_embedding_packing(model)

    def plimsoll_load_weights(
        self, weights: Iterable[tuple[str, Tensor]], *, persistent: bool = False
    ) -> None:
        """Load weights under their names in the trainer; fuse, split and pack them for vLLM.

        ``persistent``: the tensors stay unchanged until the next load.
        """
        model = self.model_runner.get_model()
        with torch.no_grad():
            if cpu_weights.can_pack(model):
                cpu_weights.load_weights(model, weights, persistent=persistent)
            else:
                self.model_runner.reload_weights(weights_iterator=iter(weights))
                cpu_weights.pack_lm_head(model)

    def plimsoll_load_shared_weights(self, path: str, table: str) -> None:
        """Load weights from shared memory, which the trainer changes only for the next load."""
        self.plimsoll_load_weights(self._plimsoll_reader.read(path, table), persistent=True)
