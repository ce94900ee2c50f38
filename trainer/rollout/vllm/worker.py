"""What runs inside vLLM's worker: it takes the trainer's weights, and reports log-probs at the run's temperature.

vLLM mixes :class:`Extension` into its worker class; the methods are called by name through ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor


class Extension:
    """Methods that vLLM's worker gains."""

    model_runner: Any

    def plimsoll_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights, under their names there; vLLM's loader fuses, splits and packs them."""
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=iter(weights))
        _pack_tied_head(self.model_runner.get_model())

    def plimsoll_scale(self, scale: float) -> None:
        """From now on log-probs are of softmax(logits / ``scale``) over the whole vocabulary.

        vLLM's own choices are those before the temperature, and those after it *and* after top-p and top-k.
        """

        def log_probs(logits: Tensor) -> Tensor:
            return (logits.float() / scale).log_softmax(dim=-1)

        self.model_runner.sampler.compute_logprobs = log_probs


def _pack_tied_head(model: Any) -> None:
    """An output projection that shares the embedding has a packed copy of its own on a CPU, which vLLM forgets to make
    anew: without this it would go on with the weights it was built with.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
