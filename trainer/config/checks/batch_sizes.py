"""The algebra of batch sizes and parallel sizes: what follows from them, and what doesn't divide.

Symbols: tp, pp, cp (or Ulysses sp), dp are the sizes of tensor, pipeline, context (sequence) and
data parallelism; world = tp * pp * cp * dp. Experts (ep) are spread inside the data-parallel ranks
and add no GPUs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import ceil, gcd, isqrt

from trainer.config.schema import Config

MOST_TRIED = 100_000
"""Numbers tried as a divisor: 10 ms."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Batch sizes and parallel sizes as they are set."""

    world: int
    """Ranks of all machines."""
    train_batch_size: int
    """Prompts of an iteration."""
    ppo_mini_batch_size: int
    """Prompts of an optimizer step."""
    micro_batch_size: int | None = None
    """Sequences of a micro-batch of a rank; None: micro-batches are cut by tokens."""
    n: int = 1
    """Responses of a prompt (1 for SFT)."""
    ppo_epochs: int = 1
    """Passes over the batch."""
    tp: int = 1
    pp: int = 1
    ep: int = 1
    cp: int = 1
    """Ranks that share a sequence: context parallel, or Ulysses."""
    heads: int | None = None
    """Query heads of the model; None: not known, not checked."""
    layers: int | None = None
    """Layers of the model."""
    experts: int | None = None
    """Experts of a layer; None or 0: a dense model."""

    @classmethod
    def from_config(cls, config: Config) -> Sizes:
        """The sizes of a run, without those of its model, which are not known yet."""
        actor = config.actor_rollout_ref.actor
        is_rl = config.trainer.mode == "rl"
        return cls(
            world=config.trainer.nnodes * config.trainer.n_gpus_per_node,
            train_batch_size=config.data.train_batch_size,
            ppo_mini_batch_size=actor.ppo_mini_batch_size,
            micro_batch_size=None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu,
            n=config.actor_rollout_ref.rollout.n if is_rl else 1,
            ppo_epochs=actor.ppo_epochs,
            cp=actor.ulysses_sequence_parallel_size,
        )


@dataclass(frozen=True, kw_only=True)
class DerivedSizes:
    """What follows from ``Sizes`` that divide."""

    dp: int
    """Data-parallel ranks."""
    samples: int
    """Sequences of an iteration."""
    mini_per_rank: int
    """Sequences of an optimizer step of a data-parallel rank."""
    optimizer_steps: int
    """Optimizer steps of an iteration."""
    accumulation: int | None
    """Static micro-batches of an optimizer step; None when they are cut by tokens."""

    def least_accumulation(self, mean_tokens: float, budget: int) -> int:
        """Fewest micro-batches of an optimizer step of a rank: ``budget`` tokens each, sequences of
        ``mean_tokens`` tokens.
        """
        return max(1, ceil(self.mini_per_rank * mean_tokens / budget))


def derive(sizes: Sizes) -> DerivedSizes:
    """The derived sizes. Raises ValueError with every violation, one a line."""
    problems = violations(sizes)
    if problems:
        raise ValueError("\n".join(problems))
    dp = sizes.world // (sizes.tp * sizes.pp * sizes.cp)
    per_rank = sizes.ppo_mini_batch_size * sizes.n // dp
    return DerivedSizes(
        dp=dp,
        samples=sizes.train_batch_size * sizes.n,
        mini_per_rank=per_rank,
        optimizer_steps=sizes.ppo_epochs * sizes.train_batch_size // sizes.ppo_mini_batch_size,
        accumulation=None if sizes.micro_batch_size is None else per_rank // sizes.micro_batch_size,
    )


def violations(sizes: Sizes) -> list[str]:
    """Everything that does not divide: inputs, derived values, nearest valid values."""
    found = []
    train = sizes.train_batch_size
    mini = sizes.ppo_mini_batch_size
    if mini > train:
        found.append(
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} is more than "
            f"data.train_batch_size={train}; set ppo_mini_batch_size={train} or less, or "
            f"train_batch_size={mini} or more"
        )
    elif train % mini:
        found.append(
            f"data.train_batch_size={train} is not a multiple of "
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} "
            f"({train} / {mini} = {train / mini:.2f} optimizer steps); nearest valid: "
            f"train_batch_size={_join(_multiples(train, mini))}, or "
            f"ppo_mini_batch_size={_join(_divisors(mini, train))}"
        )
    return found + _model_parallel(sizes) + _data_parallel(sizes)


def nearest_mini_batches(mini: int, train: int) -> str:
    """The mini-batch sizes next to ``mini`` that divide ``train``, as text."""
    return _join(_divisors(mini, train))


def _model_parallel(sizes: Sizes) -> list[str]:
    found = []
    for name, label, count, size in (
        ("tp", "query heads", sizes.heads, sizes.tp),
        ("sp", "query heads", sizes.heads, sizes.cp),
        ("pp", "layers", sizes.layers, sizes.pp),
        ("ep", "experts", sizes.experts or None, sizes.ep),
    ):
        if count is not None and count % size:
            found.append(
                f"{name}={size} does not divide the model's {count} {label}; "
                f"nearest valid: {name}={_join(_divisors(size, count))}"
            )
    if sizes.ep > 1 and sizes.experts == 0:
        found.append(f"ep={sizes.ep}, but the model has no experts; set ep=1")
    if sizes.world % (sizes.ep * sizes.pp):
        found.append(
            f"world={sizes.world} is not a multiple of ep * pp = {sizes.ep} * {sizes.pp} = "
            f"{sizes.ep * sizes.pp}; "
            f"nearest valid: world={_join(_multiples(sizes.world, sizes.ep * sizes.pp))}"
        )
    return found


def _data_parallel(sizes: Sizes) -> list[str]:
    shards = sizes.tp * sizes.pp * sizes.cp
    if sizes.world % shards:
        return [
            f"world={sizes.world} is not a multiple of tp * pp * cp = {sizes.tp} * {sizes.pp} * "
            f"{sizes.cp} = {shards} "
            f"(dp = {sizes.world / shards:.2f}); nearest valid: "
            f"world={_join(_multiples(sizes.world, shards))}"
        ]
    dp = sizes.world // shards
    mini = sizes.ppo_mini_batch_size
    n = sizes.n
    micro = sizes.micro_batch_size
    samples = mini * n
    if samples % dp:
        valid = _multiples(mini, dp // gcd(n, dp))
        return [
            f"actor_rollout_ref.actor.ppo_mini_batch_size={mini} times rollout.n={n} = {samples} "
            f"sequences don't divide over dp={dp} ranks ({samples / dp:.2f} each); "
            f"nearest valid: ppo_mini_batch_size={_join(valid)}"
        ]
    if micro is not None and samples // dp % micro:
        return [
            f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu={micro} does not divide the "
            f"{samples // dp} sequences of a rank's mini-batch (ppo_mini_batch_size={mini} * n={n} "
            f"/ dp={dp}); "
            f"nearest valid: ppo_micro_batch_size_per_gpu={_join(_divisors(micro, samples // dp))}"
        ]
    return []


def _divisors(near: int, number: int) -> list[int]:
    """The divisors of ``number`` next to ``near``, which is none: one below, one above.

    Exact up to ``MOST_TRIED ** 2``; of larger numbers those with a factor up to ``MOST_TRIED``.
    """
    small = [n for n in range(1, min(isqrt(number), MOST_TRIED) + 1) if number % n == 0]
    divisors = {*small, *(number // n for n in small)}
    below = [value for value in divisors if value <= near]
    above = [value for value in divisors if value > near]
    return [*([max(below)] if below else []), *([min(above)] if above else [])]


def _multiples(near: int, unit: int) -> list[int]:
    return sorted({value for value in (near // unit * unit, -(-near // unit) * unit) if value > 0})


def _join(values: Iterable[int]) -> str:
    return " or ".join(str(value) for value in values)
