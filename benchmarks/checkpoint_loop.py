"""The training loop that the checkpoint benchmark saves from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]
from transformers import LlamaConfig, LlamaForCausalLM

from trainer.parallel.deepspeed_setup import EngineSettings
from trainer.parallel.engine import Engine
from trainer.ranks.world import World

SMOLLM2 = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
}
SMALL = SMOLLM2 | {
    "vocab_size": 8192,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
}
TOKENS = 64
Arrays = list[np.ndarray]


class TrainingLoop:
    """A training loop on one rank, on the CPU."""

    def __init__(self, shape: dict[str, Any]) -> None:
        os.environ.update(MASTER_ADDR="127.0.0.1", RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
        world = World(
            rank=0, size=1, local_rank=0, device=torch.device("cpu"), cpu_group=dist.new_group([0])
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**shape))
        settings = EngineSettings(
            zero_stage=0, bf16=False, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1
        )
        self.engine = Engine(model, settings, world)
        self.ids = torch.randint(0, shape["vocab_size"], (1, TOKENS))

    def step(self, before_step: Callable[[], None] = lambda: None, tokens: int = TOKENS) -> None:
        """A pass without gradients, forward, backward and the optimizer step."""
        ids = self.ids[:, :tokens]
        with torch.no_grad():
            self.engine.module(ids)
        loss = self.engine.forward(ids, labels=ids).loss
        self.engine.backward(loss)
        self.engine.before_step = before_step
        self.engine.step(lr=1e-6, max_norm=1.0)

    def tensors(self) -> Arrays:
        """Weights and Adam's moments."""
        states = self.engine.optimizer.state.values()
        moments = [t for state in states for t in state.values() if t.ndim]
        return [t.detach().numpy() for t in (*self.engine.module.parameters(), *moments)]
