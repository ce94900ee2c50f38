"""What runs inside vLLM's worker: it takes the trainer's weights, and reports log-probs at the run's temperature.

vLLM mixes :class:`Extension` into its worker class; the methods are called by name through ``collective_rpc``.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.rollout.vllm.shared import read_shared

SCALE = "plimsoll_scale"
"""Extra argument of a request: its log-probs are of softmax(logits / scale)."""


class Extension:
    """Methods that vLLM's worker gains."""

    model_runner: Any

    def plimsoll_prepare(self) -> None:
        """From now on log-probs are of softmax(logits / scale) over the whole vocabulary, with each request's scale.

        vLLM's own choices are those before the temperature, and those after it *and* after top-p and top-k.
        """
        runner = self.model_runner

        def log_probs(logits: Tensor) -> Tensor:
            scales = [runner.requests[key].sampling_params.extra_args[SCALE] for key in runner.input_batch.req_ids]
            if len(scales) != len(logits):
                raise RuntimeError(f"{len(logits)} rows of logits for {len(scales)} requests")
            return (logits.float() / torch.tensor(scales, device=logits.device)[:, None]).log_softmax(dim=-1)

        runner.sampler.compute_logprobs = log_probs

    def plimsoll_load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Take the trainer's weights, under their names there; vLLM's loader fuses, splits and packs them."""
        with torch.no_grad():
            self.model_runner.reload_weights(weights_iterator=iter(weights))
        _pack_tied_head(self.model_runner.get_model())

    def plimsoll_load_shared(self, path: str, table: str) -> None:
        """The same from the memory that the trainer shares."""
        with read_shared(path, table) as weights:
            self.plimsoll_load(weights)


def _pack_tied_head(model: Any) -> None:
    """An output projection that shares the embedding has a packed copy of its own on a CPU, which vLLM forgets to make
    anew: without this it would go on with the weights it was built with.
    """
    head: Any = getattr(model, "lm_head", None)
    if hasattr(head, "cpu_linear") and getattr(model.config, "tie_word_embeddings", False):
        head.quant_method.process_weights_after_loading(head)
