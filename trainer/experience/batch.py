"""The ragged batch of a step's rollouts, and the metrics of what was sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.base.errors import Failure, UserError
from trainer.data import Batch
from trainer.experience.prompt_queue import PromptRequest
from trainer.experience.sampler import Rollouts
from trainer.parallel.exchange import means_by_name
from trainer.ranks.agreement import raise_on_all
from trainer.ranks.world import World
from trainer.rewards import Score


def to_batch(rollouts: Rollouts, requests: Sequence[PromptRequest], n: int) -> Batch:
    """This rank's responses, ``n`` per prompt, as a ragged batch of prompts and responses.

    Columns: ``input_ids``, ``loss_mask`` and ``rollout_log_probs`` [tokens]. Sampled ids are used
    as they are, never tokenised again.
    """
    # A rank without prompts takes part in later exchanges, with empty columns of these types.
    empty = torch.zeros(0, dtype=torch.int64)
    lengths = [0]
    ids = [empty]
    masks = [empty.bool()]
    log_probs = [empty.float()]
    prompt_lengths: list[int] = []
    for index, sample in zip(rollouts.prompt_indices, rollouts.samples, strict=True):
        prompt = requests[index].example.prompt_ids
        prompt_lengths.append(len(prompt))
        lengths.append(len(prompt) + len(sample.response_ids))
        ids += [torch.tensor(prompt, dtype=torch.int64), sample.response_ids]
        masks += [torch.zeros(len(prompt), dtype=torch.bool), sample.mask()]
        log_probs += [torch.zeros(len(prompt)), sample.log_probs]
    groups = torch.tensor(rollouts.prompt_indices, dtype=torch.int64)
    batch = Batch(
        torch.tensor(lengths, dtype=torch.int64).cumsum(0),
        {
            "input_ids": torch.cat(ids),
            "loss_mask": torch.cat(masks),
            "rollout_log_probs": torch.cat(log_probs),
        },
        {
            "prompt_lengths": torch.tensor(prompt_lengths, dtype=torch.int64),
            "groups": groups,
            "ids": groups * n + torch.arange(len(groups)) % n,
            "rewards": torch.tensor([s.value for s in rollouts.scores], dtype=torch.float32),
            "finished": torch.tensor([s.finished for s in rollouts.samples], dtype=torch.bool),
            "versions": torch.tensor([s.version for s in rollouts.samples], dtype=torch.int64),
        },
    )
    if rollouts.baselines is not None:
        batch.rows["baselines"] = torch.tensor(rollouts.baselines, dtype=torch.float32)
    return batch


def mask_truncated(batch: Batch) -> None:
    """Take the responses that the length limit cut off out of ``loss_mask``."""
    batch.columns["loss_mask"] &= torch.repeat_interleave(batch.rows["finished"], batch.lengths)


def zero_spread_share(batch: Batch) -> float:
    """The share of the prompts whose responses all have the same reward: no estimator that compares
    them learns from these.
    """
    _, index = torch.unique(batch.rows["groups"], return_inverse=True)
    count = int(index.max()) + 1
    lowest = torch.full((count,), torch.inf).scatter_reduce(0, index, batch.rows["rewards"], "amin")
    most = torch.full((count,), -torch.inf).scatter_reduce(0, index, batch.rows["rewards"], "amax")
    return float((lowest == most).float().mean())


def experience_metrics(batch: Batch, version: int) -> dict[str, float]:
    """Metrics of a sampled ``batch``, with verl's names: scores, lengths and the share of responses
    that were cut off.

    ``training/staleness``: by how many steps the weights that began a response are older than
    ``version``, those being trained.
    """
    prompt_lengths = batch.rows["prompt_lengths"].float()
    metrics: dict[str, float] = {}
    for name, values in (
        ("critic/score", batch.rows["rewards"]),
        ("response_length", batch.lengths.float() - prompt_lengths),
        ("prompt_length", prompt_lengths),
        ("global_seqlen", batch.lengths.float()),
    ):
        metrics[f"{name}/mean"] = float(values.mean())
        metrics[f"{name}/max"] = float(values.max())
        metrics[f"{name}/min"] = float(values.min())
    staleness = version - batch.rows["versions"].float()
    metrics["training/staleness/mean"] = float(staleness.mean())
    metrics["training/staleness/max"] = float(staleness.max())
    metrics["critic/zero_spread_groups"] = zero_spread_share(batch)
    metrics["response_length/clip_ratio"] = float((~batch.rows["finished"]).float().mean())
    return metrics


def reward_metrics(
    scores: Sequence[Score], world: World, *, rule: bool, prefix: str = ""
) -> dict[str, float]:
    """``reward/NAME``: means, over the responses of all ranks, of the numbers that the reward
    function returned with the score. With the maths ``rule`` also ``reward/unjudged``, the share of
    responses that it did not decide in time; without it ``reward/failed``, the share for which the
    function gave no number. Collective.
    """
    rows = []
    for score in scores:
        row = dict(score.extra)
        if rule:
            row["unjudged"] = float(score.unjudged)
        else:
            row["failed"] = float(score.failed != "")
        rows.append(row)
    return {f"{prefix}reward/{name}": mean for name, mean in means_by_name(rows, world).items()}


def check_failed_share(scores: Sequence[Score], world: World, most: float) -> None:
    """Collective. Raises AgreedError, with one of the failures, when the reward failed for a larger
    share than ``most`` of the responses of all ranks.
    """
    failures = [score.failed for score in scores if score.failed]
    sums = world.sum({"failed": float(len(failures)), "responses": float(len(scores))})
    if sums["failed"] <= most * sums["responses"]:
        return
    error = None
    if failures:
        error = UserError(
            f"the reward failed for {sums['failed']:.0f} of {sums['responses']:.0f} responses, a "
            f"larger share than reward.max_failed_share={most:g}. The first: {failures[0]}"
        )
    raise_on_all(world, error, elsewhere=Failure("a reward failed on another rank"))


def mean_response_lengths(batch: Batch) -> tuple[list[int], list[float]]:
    """The groups of ``batch`` [groups], and the mean response length of each [groups], tokens."""
    response_lengths = (batch.lengths - batch.rows["prompt_lengths"]).double()
    groups, group_of = torch.unique(batch.rows["groups"], return_inverse=True)
    sums = torch.zeros(len(groups), dtype=torch.float64).index_add_(0, group_of, response_lengths)
    counts = torch.bincount(group_of, minlength=len(groups))
    return groups.tolist(), (sums / counts).tolist()
