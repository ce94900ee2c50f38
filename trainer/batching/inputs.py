"""Checks of the planner's arguments. Every message says what, where, and what to type instead."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from trainer.base.errors import UserError
from trainer.batching.cost import Ints

BUDGET_KEYS = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu"
LENGTH_KEYS = "data.max_prompt_length / data.max_response_length"
BOUNDARY_KEYS = "actor_rollout_ref.actor.bucket_boundaries"


def whole_numbers(values: ArrayLike, name: str) -> Ints:
    """``values`` as int64 [n]. Raises UserError for a fraction, a non-number or a second dimension.

    ``name`` is what the message calls them.
    """
    array: NDArray[np.generic] = np.asarray(values)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1:
        raise UserError(f"{name}: expected a flat list, got an array of shape {array.shape}")
    if array.dtype.kind not in "iuf":
        raise UserError(f"{name}: expected whole numbers, got {array.dtype}")
    out = array.astype(np.int64)
    if array.dtype.kind == "f" and not np.array_equal(out, array):
        at = int(np.flatnonzero(out != array)[0])
        raise UserError(f"{name}: entry {at} is {array[at]}, expected a whole number")
    return out


def check_lengths(lengths: ArrayLike) -> Ints:
    """int64 [sequences]. Raises UserError where a length is below 1."""
    out = whole_numbers(lengths, "sequence lengths")
    if out.size and int(out.min()) < 1:
        at = int(np.flatnonzero(out < 1)[0])
        raise UserError(
            f"sequence {at} has length {int(out[at])}; every sequence needs a token: drop it first"
        )
    return out


def check_budgets(
    budget: int | Sequence[int] | Ints, ranks: int, *, key: str = BUDGET_KEYS
) -> Ints:
    """int64 [ranks]: the budget of each rank in tokens, from one number or one per rank.

    Raises UserError for another count, or a budget below 1.
    """
    if ranks < 1:
        raise UserError(f"the planner needs at least 1 rank, got {ranks}")
    values = whole_numbers(np.atleast_1d(np.asarray(budget)), key)
    if values.size not in (1, ranks):
        raise UserError(
            f"{key} lists {values.size} budgets for {ranks} ranks; give one number, or {ranks} of "
            "them"
        )
    out = np.full(ranks, values[0], np.int64) if values.size == 1 else values
    if int(out.min()) < 1:
        raise UserError(
            f"{key}: rank {int(out.argmin())} has a budget of {int(out.min())} tokens; it must be "
            "positive"
        )
    return out


def check_fits(lengths: Ints, budgets: Ints, *, key: str = BUDGET_KEYS) -> None:
    """Raise UserError when a sequence is longer than the largest budget.

    ``lengths`` are [sequences], ``budgets`` [ranks].
    """
    cap = int(budgets.max())
    if lengths.size and int(lengths.max()) > cap:
        at = int(lengths.argmax())
        over = int((lengths > cap).sum())
        more = f" ({over} sequences are too long)" if over > 1 else ""
        raise UserError(
            f"sequence {at} has {int(lengths[at])} tokens, more than the budget of {cap} tokens "
            f"per micro-batch{more}; "
            f"raise {key} to {int(lengths[at])} or more, or lower {LENGTH_KEYS}"
        )


def check_boundaries(boundaries: ArrayLike, *, key: str = BOUNDARY_KEYS) -> Ints:
    """int64 [boundaries]. Raises UserError unless they are positive and strictly rising."""
    out = whole_numbers(boundaries, key)
    shown = out.tolist()
    if out.size and int(out[0]) < 1:
        raise UserError(f"{key}={shown}: the first boundary must be at least 1")
    falls = np.flatnonzero(np.diff(out) <= 0)
    if falls.size:
        a, b = shown[int(falls[0])], shown[int(falls[0]) + 1]
        raise UserError(
            f"{key}={shown}: {b} follows {a}, but boundaries must rise; try {sorted(set(shown))}"
        )
    return out


def check_prompts(prompts: ArrayLike, lengths: Ints) -> Ints:
    """int64 [sequences]: tokens of the prompt of each sequence.

    Raises UserError for another count than ``lengths`` [sequences] has, or a prompt longer than its
    sequence.
    """
    out = whole_numbers(prompts, "prompt lengths")
    if out.size != lengths.size:
        raise UserError(
            f"{out.size} prompt lengths for {lengths.size} sequences; give one per sequence"
        )
    wrong = np.flatnonzero((out < 0) | (out > lengths))
    if wrong.size:
        at = int(wrong[0])
        raise UserError(
            f"sequence {at}: prompt length {int(out[at])} must be 0 .. {int(lengths[at])} (its "
            "length)"
        )
    return out


def check_groups(groups: ArrayLike, lengths: Ints) -> Ints:
    """int64 [sequences]: group of each sequence, renumbered 0 .. groups-1.

    Raises UserError for another count than ``lengths`` [sequences] has.
    """
    out = whole_numbers(groups, "groups")
    if out.size != lengths.size:
        raise UserError(
            f"{out.size} group numbers for {lengths.size} sequences; give one per sequence"
        )
    small = out.size and int(out.min()) >= 0 and int(out.max()) < out.size
    if small:  # nearly always, and quicker than np.unique
        return (np.cumsum(np.bincount(out) > 0) - 1)[out]
    return np.unique(out, return_inverse=True)[1].astype(np.int64).reshape(-1)


def check_shared(prompts: Ints, groups: Ints) -> None:
    """Raise UserError when the sequences of a group have prompts of different lengths.

    ``prompts`` and ``groups`` are [sequences].
    """
    if not groups.size:
        return
    prompt_of_group = np.empty(int(groups.max()) + 1, np.int64)
    prompt_of_group[groups] = prompts
    wrong = groups[prompt_of_group[groups] != prompts]
    if wrong.size:
        members = np.flatnonzero(groups == wrong.min())
        raise UserError(
            f"sequences {members.tolist()} are one group but their prompts have "
            f"{int(prompts[members].min())} to {int(prompts[members].max())} tokens; "
            "share_prompt needs one prompt per group: number the groups by prompt, or set "
            "actor_rollout_ref.actor.share_prompt=False"
        )
