"""What the state of a run needs of a rank: the real parts, without a model."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from tests.data.toy import Toy
from trainer.algorithms.kl import AdaptiveKl
from trainer.batching import Calibrator
from trainer.checkpoint.snapshot.parts import Parts
from trainer.data import Loader
from trainer.experience.prompts import Ask, Prompts
from trainer.rollout import Sample
from trainer.run.best_metric import Best
from trainer.run.state import RunIdentity, rank_parts, shared_parts
from trainer.tracking.wandb_run import Identity, keep_identity


class Rank:
    """Stands for a ``Context``."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.train_data = Toy(40)
        self.loader = Loader(self.train_data, batch_size=4, seed=1, shuffle=True)
        self.rolling = SimpleNamespace(prompts=Prompts(iter([])), settle=lambda: None)
        self.kl = AdaptiveKl(0.1, target=0.05, horizon=100)
        self.calibrator = Calibrator()
        self.samples_seen, self.productive_s = 0, 0.0
        self.budgets: list[int] | None = None
        self.reference = None
        self.loaded = SimpleNamespace(frozen=None)
        self.world = SimpleNamespace(size=2, device=torch.device("cpu"))
        self.best = Best("val/reward")
        self.identity = RunIdentity(run_dir, writes=True)
        self.identity.own = True

    def lower_budgets(self, budgets: list[int]) -> None:
        self.budgets = budgets

    def parts(self) -> tuple[Parts, Parts]:
        return shared_parts(self, self.best, self.identity), rank_parts(self)  # type: ignore[arg-type]

    def train(self) -> None:
        """Change everything that changes."""
        with self.loader:
            next(iter(self.loader))
        begun = Sample(torch.arange(3), torch.rand(3), "aborted", 2)
        self.rolling.prompts.give_back(
            [Ask(example=self.train_data[5], step=1, number=3, begun=(begun,))]
        )
        self.rolling.prompts.observe([self.train_data[1]], [17.0])
        self.kl.update(0.2, 10)
        for tokens in (10, 20, 40):
            self.calibrator.add(tokens, tokens**2, tokens * 1e-3 + 0.01)
        self.samples_seen, self.productive_s = 4, 1.5
        self.lower_budgets([512, 256])
        self.best.observe(3, {"val/reward": 0.5})
        keep_identity(self.run_dir, Identity("abc", "project", "name", None))
        self.identity.last_step = 3
        random.random()
        np.random.rand()
        torch.rand(1)
