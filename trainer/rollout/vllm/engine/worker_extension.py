"""What runs inside vLLM's worker: it takes the trainer's weights, and draws as the trainer does.

vLLM mixes :class:`Extension` into its worker class; the methods are called by name through
``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.rollout.vllm.engine import multi_token as ahead
from trainer.rollout.vllm.engine import sampler
from trainer.rollout.vllm.engine.cpu_kernels import use_kernels
from trainer.rollout.vllm.engine.cpu_weights import can_pack, drop_unused, load_plain, pack_head
from trainer.rollout.vllm.server.shared_weights import Reader


class Extension:
    """Methods that vLLM's worker gains."""

    model_runner: Any

    def plimsoll_prepare(self) -> None:
        """From now on tokens are drawn as the hf engine draws them."""
        self._plimsoll_reader = Reader()
        sampler.install(self.model_runner)
        ahead.install(self.model_runner)
        model = self.model_runner.get_model()
        if can_pack(model):
            use_kernels(model)
            drop_unused(model)

    def plimsoll_load(
        self, weights: Iterable[tuple[str, Tensor]], *, lasting: bool = False
    ) -> None:
        """Take the trainer's weights, under their names there; fused, split and packed as vLLM
        wants them. ``lasting``: they stay until the next ones come.
        """
        model = self.model_runner.get_model()
        with torch.no_grad():
            if can_pack(model):
                load_plain(model, weights, lasting=lasting)
            else:
                self.model_runner.reload_weights(weights_iterator=iter(weights))
                pack_head(model)

    def plimsoll_load_shared(self, path: str, table: str) -> None:
        """The same from the memory that the trainer shares, and changes only to bring the next
        ones.
        """
        self.plimsoll_load(self._plimsoll_reader.read(path, table), lasting=True)
