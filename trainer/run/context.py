"""The components of a run on one rank, and the few counters that change from step to step."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from trainer.algorithms import KlController
from trainer.batching import Calibrator, CostModel
from trainer.config.schema import Config
from trainer.data import Dataset, Example, Loader
from trainer.experience.collector import RolloutCollector
from trainer.experience.sampler import Sampler
from trainer.experience.weight_sync import WeightSync
from trainer.models import LoadedModel
from trainer.parallel.engine import Engine
from trainer.ranks.world import World
from trainer.rewards import Scorer
from trainer.run.critic import Critic
from trainer.tracking import Timers
from trainer.update.losses import PolicyObjective, SftObjective
from trainer.update.micro_batches import MicroBatchConfig


@dataclass(kw_only=True)
class RunContext:
    """Built once by ``trainer.run.build``; ``trainer.run.state`` registers what a checkpoint keeps.

    Closes the processes and threads of its components when used as a context manager.
    """

    config: Config
    run_dir: Path
    world: World
    model: LoadedModel
    engine: Engine
    reference: nn.Module | None
    """The policy that the KL refers to: a copy of the first weights; with LoRA the policy itself,
    used with its adapters off. None when no KL is computed.
    """
    train_data: Dataset
    val_examples: list[Example]
    loader: Loader
    objective: PolicyObjective | SftObjective
    update_pass: MicroBatchConfig
    """Micro-batches of training."""
    log_prob_pass: MicroBatchConfig
    """Micro-batches of the policy's forward passes without gradients."""
    ref_pass: MicroBatchConfig
    """Micro-batches of the reference's forward passes."""
    cost_model: CostModel
    kl_controller: KlController
    timers: Timers
    scorer: Scorer
    critic: Critic | None = None
    """The model of values; None when the advantages need none."""
    weight_sync: WeightSync | None = None
    """The rollout engine and its weights; None when nothing is generated."""
    collector: RolloutCollector | None = None
    """Rollouts for training; None in SFT."""
    val_sampler: Sampler | None = None
    """Responses for validation; None without validation data."""
    notes: list[str] = field(default_factory=list)
    """Lines for the user at the start."""
    calibrator: Calibrator = field(default_factory=Calibrator)
    """Measured times of this rank's micro-batches."""
    samples_seen: int = 0
    unlogged: dict[str, Any] | None = None
    """Metrics of the newest step while its validation is outstanding; None otherwise. A stop in a
    validation saves them, and the resumed run validates and logs the step.
    """
    stop_step: int = 0
    """The step that a stop saves: the last one whose update has begun."""
    productive_s: float = 0.0
    """Seconds spent in training steps that were kept, earlier attempts included."""
    lowered_budgets: list[int] | None = None
    """Budgets of all ranks, once one of them ran out of memory."""

    @property
    def tokenizer(self) -> Any:
        """The model's tokenizer."""
        return self.model.tokenizer

    @property
    def is_rl(self) -> bool:
        """True for RL, False for SFT."""
        return self.config.trainer.mode == "rl"

    @property
    def validates(self) -> bool:
        """Whether there are validation prompts and a reward for their answers."""
        return self.val_sampler is not None and bool(self.val_examples)

    @property
    def total_steps(self) -> int:
        """Training steps of the run: iterations of RL, batches of SFT."""
        trainer = self.config.trainer
        return trainer.total_training_steps or len(self.loader) * trainer.total_epochs

    def lower_budgets(self, budgets: list[int]) -> None:
        """Plan training with these budgets (tokens, one per rank) from now on."""
        self.lowered_budgets = [int(budget) for budget in budgets]
        self.update_pass = self.update_pass.with_budgets(self.lowered_budgets)

    def __enter__(self) -> RunContext:
        return self

    def __exit__(self, *error: object) -> None:
        """End all processes and threads; the rollout engine first, since others wait for it."""
        with ExitStack() as components:
            components.callback(self.loader.close)
            components.callback(self.scorer.close)
            if self.collector is not None:
                components.callback(self.collector.close)
            if self.weight_sync is not None:
                components.callback(self.weight_sync.close)
