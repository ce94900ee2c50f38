"""From rollouts to a ragged batch, and what is logged of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.data import Batch
from trainer.experience.prompts import Ask
from trainer.experience.sampler import Rollouts
from trainer.parallel.exchange import means_by_name
from trainer.ranks.world import World
from trainer.rewards import Score


def to_batch(rollouts: Rollouts, asks: Sequence[Ask], n: int) -> Batch:
    """This rank's responses as a ragged batch. Sampled ids are kept as they are, never
    re-tokenised.
    """
    ids, masks, log_probs, finished = [], [], [], []
    for number, sample in zip(rollouts.prompts, rollouts.samples, strict=True):
        prompt = asks[number].example.prompt_ids
        ids.append(torch.cat([torch.tensor(prompt, dtype=torch.int64), sample.response_ids]))
        mask = torch.zeros(len(ids[-1]), dtype=torch.bool)
        mask[len(prompt) :] = True if sample.written is None else sample.written
        masks.append(mask)
        behaviour = torch.zeros(len(ids[-1]), dtype=torch.float32)
        behaviour[len(prompt) :] = sample.log_probs
        log_probs.append(behaviour)
        finished.append(sample.finished)
    numbers = torch.tensor(rollouts.prompts, dtype=torch.int64)
    # A rank without prompts still takes part in the exchange, with empty columns of the right
    # types.
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
        "prompt_lengths": torch.tensor(
            [len(asks[i].example.prompt_ids) for i in rollouts.prompts], dtype=torch.int64
        ),
        "groups": numbers,
        "ids": numbers * n + torch.arange(len(numbers)) % n,
        "rewards": torch.tensor([s.value for s in rollouts.scores], dtype=torch.float32),
        "finished": torch.tensor(finished, dtype=torch.bool),
        "versions": torch.tensor([s.version for s in rollouts.samples], dtype=torch.int64),
    }
    return batch


def experience_metrics(batch: Batch, version: int) -> dict[str, float]:
    """verl's names for what was sampled: scores, lengths, how many responses were cut, and by how
    many iterations the weights that began them lag ``version``, those being trained.
    """
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
    lag = version - batch.rows["versions"].float()
    found |= {
        "training/staleness/mean": float(lag.mean()),
        "training/staleness/max": float(lag.max()),
    }
    found["response_length/clip_ratio"] = float((~batch.rows["finished"]).float().mean())
    return found


def reward_metrics(
    scores: Sequence[Score], world: World, *, rule: bool, prefix: str = ""
) -> dict[str, float]:
    """``reward/NAME``: means over the responses of all ranks of what the reward function said
    beside the score; of the maths ``rule`` the share of answers that it gave up. Collective.
    """
    rows = [
        {**score.extra, **({"unjudged": float(score.unjudged)} if rule else {})} for score in scores
    ]
    return {f"{prefix}reward/{name}": mean for name, mean in means_by_name(rows, world).items()}


def mean_response_lengths(batch: Batch) -> tuple[list[int], list[float]]:
    """The groups of ``batch``, and of each the mean length of its responses, in tokens."""
    responses = (batch.lengths - batch.rows["prompt_lengths"]).double()
    groups, place = torch.unique(batch.rows["groups"], return_inverse=True)
    sums = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, place, responses)
    return groups.tolist(), (sums / torch.bincount(place, minlength=len(groups))).tolist()
