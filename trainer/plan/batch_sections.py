"""Sections of a plan about the batch: its sizes, and the token budget.

A section is rows of (name, value).
"""

from __future__ import annotations

from collections.abc import Iterator

from trainer.batching.budget import recommended_budget
from trainer.config.checks.batch_sizes import DerivedSizes, Sizes
from trainer.config.schema import Budget, Config
from trainer.plan.lengths import DataLengths
from trainer.plan.options import PlanOptions

Rows = Iterator[tuple[str, str]]


def batch_rows(
    config: Config, sizes: Sizes, derived: DerivedSizes, mean: tuple[float, float]
) -> Rows:
    """Batch and parallel sizes, each with the arithmetic behind it."""
    yield (
        "world",
        f"{sizes.world} = tp {sizes.tp} * pp {sizes.pp} * cp {sizes.cp} * dp {derived.dp} (ep "
        f"{sizes.ep})",
    )
    yield (
        "sequences of an iteration",
        f"{derived.samples} = {sizes.train_batch_size} prompts * n {sizes.n}",
    )
    yield (
        "optimizer steps",
        f"{derived.optimizer_steps} an iteration = {sizes.ppo_epochs} * {sizes.train_batch_size} / "
        f"{sizes.ppo_mini_batch_size}" + _ratio_advice(sizes),
    )
    yield (
        "sequences of a step",
        f"{derived.mini_per_rank} a rank = {sizes.ppo_mini_batch_size} * {sizes.n} / {derived.dp}",
    )
    if derived.accumulation is not None:
        yield (
            "micro-batches of a step",
            f"{derived.accumulation} of {sizes.micro_batch_size} sequences",
        )
        return
    budget = smallest_budget(config)
    if budget is None:
        yield "micro-batches of a step", "budget auto: known at start"
        return
    least = derived.least_accumulation(sum(mean), budget * sizes.cp)
    yield (
        "micro-batches of a step",
        f"at least {least} = {derived.mini_per_rank} * {sum(mean):.0f} tokens / {budget}",
    )


def _ratio_advice(sizes: Sizes) -> str:
    ratio = sizes.train_batch_size // sizes.ppo_mini_batch_size
    if sizes.n == 1 or ratio == 4:
        return ""
    return "  (4 mini-batches a batch are recommended for RL)"


def budget_rows(
    config: Config, options: PlanOptions, mean: tuple[float, float], lengths: DataLengths | None
) -> Rows:
    """Lengths, and the token budget that follows from them."""
    longest = longest_sequence(config)
    if lengths is not None:
        method = "estimated from characters: no tokenizer at hand"
        if lengths.exact:
            method = "by the model's tokenizer"
        yield "data", f"{lengths.rows} rows, the first {lengths.measured} measured, {method}"
        advice = ""
        if lengths.longest > longest:
            advice = ": raise data.max_prompt_length or max_response_length"
        yield "longest", f"{lengths.longest} tokens (allowed {longest}){advice}"
    measured = lengths is not None and lengths.mean_response is not None
    assumed = ""
    if options.mean_response is None and not measured:
        assumed = "  (half of data.max_response_length; set plan.mean_response)"
    yield "mean prompt + response", f"{mean[0]:.0f} + {mean[1]:.0f} tokens{assumed}"
    tokens = round(sum(mean) * options.concurrent)
    holds_longest = 1 << (longest - 1).bit_length()
    budget = max(recommended_budget(*mean, options.concurrent), holds_longest)
    yield (
        "recommended",
        f"{budget} = ({mean[0]:.0f} + {mean[1]:.0f}) * {options.concurrent} = {tokens}, to the "
        "next power of two",
    )
    now = str(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu).replace(" ", "")
    yield "now", f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={now}"


def smallest_budget(config: Config) -> int | None:
    """The smallest token budget of any rank; None for ``auto``."""
    return smallest_of(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu)


def smallest_of(budget: Budget) -> int | None:
    """The smallest of a budget given by rank; None for ``auto``."""
    if isinstance(budget, str):
        return None
    return min(budget) if isinstance(budget, list) else budget


def longest_sequence(config: Config) -> int:
    """Most tokens of prompt and response together."""
    return config.data.max_prompt_length + config.data.max_response_length
