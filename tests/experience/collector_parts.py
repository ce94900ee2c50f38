"""A collector with real components around a small model, and an engine with its own weights."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from tests.data.toy import Toy
from tests.models.support import make_model
from trainer.data import Example
from trainer.experience.collector import RolloutCollector
from trainer.experience.group_filter import GroupFilter
from trainer.experience.prompt_queue import PromptQueue
from trainer.experience.sampler import Sampler
from trainer.experience.weight_sync import WeightSync
from trainer.rewards import Scorer
from trainer.rollout import Sampling
from trainer.rollout.hf import HfEngine

DATA = Toy(40)
SCORERS: list[Scorer] = []
"""Every scorer made, closed after each test: the workers hold the open files of this process."""
EOS = [1, 2, 3, 4, 5, 6, 7, 8]


class CopyEngine(HfEngine):
    """Generates with a copy of the model, which has to be given the weights."""

    shares_weights = False

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(copy.deepcopy(module), **settings)
        self.calls: list[str] = []
        with torch.no_grad():
            for p in self.module.parameters():
                p.zero_()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        parameters = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                parameters[name].copy_(tensor)
        self.calls.append(f"weights {version}")
        self.version = version

    def start(self) -> None:
        self.calls.append("start")

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")


class NumberTokenizer:
    """Decodes ids as numbers."""

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(map(str, row)) for row in rows]


def length_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return float(len(solution_str.split()))


def parity_reward(solution_str: str, **_: Any) -> float:
    """Whether the number of tokens is odd: equal for about half of all pairs of responses."""
    return float(len(solution_str.split()) % 2)


class Engine:
    """Stands for the training engine: the module, and the methods used around a generation."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.settings = SimpleNamespace(zero_stage=1)
        self.gathers = 0

    @contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        self.gathers += 1
        yield self.module

    def trim_memory(self) -> None: ...

    def train(self) -> None:
        """Change the weights, the same way each time."""
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.module.parameters():
                p.add_(torch.randn(p.shape, generator=draw) * 0.02)


def batches(size: int) -> Iterator[list[Example]]:
    first = 0
    while True:
        yield [DATA[i % 40] for i in range(first, first + size)]
        first += size


def make_collector(
    world: Any = None,
    *,
    batch_size: int = 4,
    n: int = 2,
    over_sampling: float = 1.0,
    max_staleness: int = 0,
    one_step_off: bool = False,
    copied: bool = False,
    streaming: bool = True,
    reward: Any = length_reward,
    most_rounds: int = 0,
) -> tuple[RolloutCollector, Engine, HfEngine]:
    module = make_model()
    engine = Engine(module)
    SCORERS.append(Scorer(reward, workers=1))
    rollout = (CopyEngine if copied else HfEngine)(module, eos_ids=EOS, max_num_seqs=4)
    sampler = Sampler(
        generator=rollout,
        sampling=Sampling(max_response_length=12),
        n=n,
        scorer=SCORERS[-1],
        tokenizer=NumberTokenizer(),
        seed=5,
        streaming=streaming,
    )
    prompts = PromptQueue(
        batches(batch_size), over_sampling=over_sampling, max_staleness=max_staleness
    )
    world = world or SimpleNamespace(
        rank=0, size=1, sum_tensor=lambda t: t, any=int, gather=lambda value: [value]
    )
    collector = RolloutCollector(
        prompts,
        sampler,
        WeightSync(rollout, engine),
        world,
        batch_size=batch_size,
        one_step_off=one_step_off,  # type: ignore[arg-type]
        group_filter=GroupFilter(metric="acc", most_rounds=most_rounds, n=n)
        if most_rounds
        else None,
    )
    return collector, engine, rollout
