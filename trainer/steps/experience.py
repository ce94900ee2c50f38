"""From prompts to a ragged batch with responses and scores: rollout and reward of one iteration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from trainer.data import Batch, Example
from trainer.parallel.engine import Engine
from trainer.rewards import RewardRequest, Score, Scorer
from trainer.rollout import RolloutEngine, Sample
from trainer.tracking import Timers


@dataclass(frozen=True)
class Rollouts:
    """What one rank generated: prompt number (in the global batch), sample and score of each response."""

    prompts: list[int]
    samples: list[Sample]
    scores: list[Score]
    texts: list[str]


def shares(count: int, ranks: int) -> list[int]:
    """Prompts of each rank; they differ by one at most."""
    return [len(range(rank, count, ranks)) for rank in range(ranks)]


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How responses come about and are judged: while training, or for validation."""

    generator: RolloutEngine
    n: int
    """Responses of a prompt."""
    scorer: Scorer
    tokenizer: Any
    seed: int
    timer: str = ""
    """Put before the names of the timers."""

    def roll_out(
        self, engine: Engine, examples: Sequence[Example], timers: Timers, *, step: int, first: int = 0
    ) -> Rollouts:
        """Generate and score ``n`` responses for this rank's share of ``examples``.

        Random numbers belong to (seed, step, prompt, sample), so the share of a rank doesn't change what is drawn.
        ``first`` is the number of the first prompt, where ``examples`` are a part of something larger.
        """
        world = engine.world
        numbers = [i for i in range(world.rank, len(examples), world.size) for _ in range(self.n)]
        ids = [(first + number) * self.n + k % self.n for k, number in enumerate(numbers)]
        with timers(self.timer + "gen"), engine.whole_weights():
            samples = self.generator.generate([examples[i].prompt_ids for i in numbers], ids, self.seed, step)
        engine.trim()
        with timers(self.timer + "reward"):
            texts = self.tokenizer.batch_decode([s.response_ids for s in samples], skip_special_tokens=True)
            scores = self.scorer.score([_request(examples[i], text) for i, text in zip(numbers, texts, strict=True)])
        return Rollouts(numbers, samples, scores, texts)


def to_batch(rollouts: Rollouts, examples: Sequence[Example], n: int) -> Batch:
    """This rank's responses as a ragged batch. Sampled ids are kept as they are, never re-tokenised."""
    ids, masks, log_probs, finished = [], [], [], []
    for number, sample in zip(rollouts.prompts, rollouts.samples, strict=True):
        prompt = examples[number].prompt_ids
        ids.append(torch.cat([torch.tensor(prompt, dtype=torch.int64), sample.response_ids]))
        mask = torch.zeros(len(ids[-1]), dtype=torch.bool)
        mask[len(prompt) :] = True
        masks.append(mask)
        behaviour = torch.zeros(len(ids[-1]), dtype=torch.float32)
        behaviour[len(prompt) :] = sample.log_probs
        log_probs.append(behaviour)
        finished.append(sample.finished)
    numbers = torch.tensor(rollouts.prompts, dtype=torch.int64)
    # A rank without prompts still takes part in the exchange, with empty columns of the right types.
    empty = torch.zeros(0, dtype=torch.int64)
    columns = {"input_ids": ids, "loss_mask": masks, "rollout_log_probs": log_probs}
    batch = (
        Batch.from_sequences(columns)
        if ids
        else Batch(
            torch.zeros(1, dtype=torch.int64),
            {"input_ids": empty, "loss_mask": empty.bool(), "rollout_log_probs": empty.float()},
        )
    )
    batch.rows = {
        "prompt_lengths": torch.tensor([len(examples[i].prompt_ids) for i in rollouts.prompts], dtype=torch.int64),
        "groups": numbers,
        "ids": numbers * n + torch.arange(len(numbers)) % n,
        "rewards": torch.tensor([s.value for s in rollouts.scores], dtype=torch.float32),
        "finished": torch.tensor(finished, dtype=torch.bool),
    }
    return batch


def _request(example: Example, text: str) -> RewardRequest:
    return RewardRequest(
        data_source=example.data_source,
        solution_text=text,
        ground_truth=example.ground_truth,
        extra_info=example.extra_info,
        index=example.index,
    )


def experience_metrics(batch: Batch) -> dict[str, float]:
    """verl's names for what was sampled: scores, lengths, how many responses were cut."""
    scores, prompts = batch.rows["rewards"], batch.rows["prompt_lengths"].float()
    responses = batch.lengths.float() - prompts
    found: dict[str, float] = {}
    for name, values in (
        ("critic/score", scores),
        ("response_length", responses),
        ("prompt_length", prompts),
        ("global_seqlen", batch.lengths.float()),
    ):
        found |= {
            f"{name}/mean": float(values.mean()),
            f"{name}/max": float(values.max()),
            f"{name}/min": float(values.min()),
        }
    found["response_length/clip_ratio"] = float((~batch.rows["finished"]).float().mean())
    return found
