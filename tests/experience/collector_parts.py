"""The real parts of a rank's rollouts around a small model, and an engine with weights of its
own.
"""

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
from trainer.experience.collector import Rolling
from trainer.experience.prompts import Prompts
from trainer.experience.sampler import Sampler
from trainer.experience.weight_sync import Synced
from trainer.rewards import Scorer
from trainer.rollout import Sampling
from trainer.rollout.hf import HfEngine

DATA = Toy(40)
SCORERS: list[Scorer] = []
"""Of all parts made, to be closed at the end of a test: their workers hold what this process has
open.
"""
EOS = [1, 2, 3, 4, 5, 6, 7, 8]


class Copied(HfEngine):
    """Generates with a copy of the model, to which weights are handed over."""

    shares_weights = False

    def __init__(self, module: nn.Module, **how: Any) -> None:
        super().__init__(copy.deepcopy(module), **how)
        self.calls: list[str] = []
        with torch.no_grad():
            for p in self.module.parameters():
                p.zero_()

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        own = dict(self.module.named_parameters())
        with torch.no_grad():
            for name, tensor in weights:
                own[name].copy_(tensor)
        self.calls.append(f"weights {version}")
        self.version = version

    def start(self) -> None:
        self.calls.append("start")

    def wake(self) -> None:
        self.calls.append("wake")

    def sleep(self) -> None:
        self.calls.append("sleep")


class Words:
    """A tokenizer that writes ids as numbers."""

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [" ".join(map(str, row.tolist())) for row in rows]


def length_reward(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None
) -> float:
    return float(len(solution_str.split()))


class Engine:
    """Stands for the trainer's engine: the module, and what is asked of it around generation."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.settings, self.whole = module, SimpleNamespace(zero_stage=1), 0

    @contextmanager
    def whole_weights(self) -> Iterator[nn.Module]:
        self.whole += 1
        yield self.module

    def trim(self) -> None: ...

    def train(self) -> None:
        """Change the weights, the same way each time."""
        draw = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for p in self.module.parameters():
                p.add_(torch.randn(p.shape, generator=draw) * 0.02)


def batches(size: int) -> Iterator[list[Example]]:
    at = 0
    while True:
        yield [DATA[i % 40] for i in range(at, at + size)]
        at += size


def make_rolling(
    world: Any = None,
    *,
    want: int = 4,
    n: int = 2,
    over: float = 1.0,
    staleness: int = 0,
    one_step_off: bool = False,
    copied: bool = False,
    streaming: bool = True,
    reward: Any = length_reward,
) -> tuple[Rolling, Engine, HfEngine]:
    module = make_model()
    engine = Engine(module)
    SCORERS.append(Scorer(reward, workers=1))
    rollout = (Copied if copied else HfEngine)(module, eos_ids=EOS, max_num_seqs=4)
    sampler = Sampler(
        speaker=rollout,
        sampling=Sampling(max_response_length=12),
        n=n,
        scorer=SCORERS[-1],
        tokenizer=Words(),
        seed=5,
        streaming=streaming,
    )
    prompts = Prompts(batches(want), over_sampling=over, max_staleness=staleness)
    world = world or SimpleNamespace(
        rank=0, size=1, sum_tensor=lambda t: t, any=int, texts=lambda t: [t]
    )
    rolling = Rolling(
        prompts,
        sampler,
        Synced(rollout, engine),
        world,
        want=want,
        one_step_off=one_step_off,  # type: ignore[arg-type]
    )
    return rolling, engine, rollout
