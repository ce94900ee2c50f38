"""A stand-in for a rank's run: the real components that have state, without a model."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from tests.data.toy import Toy
from trainer.algorithms.kl import AdaptiveKl
from trainer.batching import Calibrator
from trainer.checkpoint.snapshot.state_registry import StateRegistry
from trainer.data import Loader
from trainer.experience.prompt_queue import PromptQueue, PromptRequest
from trainer.rollout import Sample
from trainer.run.best_metric import BestMetric
from trainer.run.state import RunIdentity, global_state, rank_state
from trainer.tracking.wandb_run import WandbIdentity, save_identity


class Rank:
    """Stands in for a ``RunContext``."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.train_data = Toy(40)
        self.loader = Loader(self.train_data, batch_size=4, seed=1, shuffle=True)
        self.collector = SimpleNamespace(prompts=PromptQueue(iter([])), drain=lambda: None)
        self.kl_controller = AdaptiveKl(0.1, target=0.05, horizon=100)
        self.calibrator = Calibrator()
        self.samples_seen = 0
        self.productive_s = 0.0
        self.unlogged: dict[str, Any] | None = None
        self.lowered_budgets: list[int] | None = None
        self.reference = None
        self.model = SimpleNamespace(has_adapters=False)
        self.critic: Any = None
        self.world = SimpleNamespace(size=2, device=torch.device("cpu"))
        self.best = BestMetric("val/reward")
        self.identity = RunIdentity(run_dir, writes=True)
        self.identity.same_run = True

    def lower_budgets(self, budgets: list[int]) -> None:
        self.lowered_budgets = budgets

    def states(self) -> tuple[StateRegistry, StateRegistry]:
        return global_state(self, self.best, self.identity), rank_state(self)  # type: ignore[arg-type]

    def train(self) -> None:
        """Change every state that training changes."""
        with self.loader:
            next(iter(self.loader))
        partial = Sample(torch.arange(3), torch.rand(3), "aborted", 2)
        self.collector.prompts.put_back(
            [
                PromptRequest(
                    example=self.train_data[5], step=1, number=3, partial_samples=(partial,)
                )
            ]
        )
        self.collector.prompts.record_lengths([self.train_data[1]], [17.0])
        self.kl_controller.update(0.2, 10)
        for tokens in (10, 20, 40):
            self.calibrator.add(tokens, tokens**2, tokens * 1e-3 + 0.01)
        self.samples_seen = 4
        self.productive_s = 1.5
        self.unlogged = {"train/nll": 1.25, "timing/step": 0.5}
        self.lower_budgets([512, 256])
        self.best.observe(3, {"val/reward": 0.5})
        save_identity(self.run_dir, WandbIdentity("abc", "project", "name", None))
        self.identity.last_step = 3
        random.random()
        np.random.rand()
        torch.rand(1)
