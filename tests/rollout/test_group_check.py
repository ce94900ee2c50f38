"""Every engine refuses the same groups, in the same words."""

from __future__ import annotations

import pytest
import torch

from trainer.base.errors import UserError
from trainer.rollout import Group, Sample
from trainer.rollout.group_check import ENGINE_LENGTH, FEWER_PROMPTS, require_valid_groups


def group(length: int, samples: int = 1, partial: int = 0) -> Group:
    sample = Sample(torch.tensor([20]), torch.tensor([-1.0]), "aborted")
    return Group(
        prompt_ids=[3] * length,
        sample_ids=range(samples),
        step=0,
        partial_samples=[sample] * partial,
    )


def test_a_prompt_has_to_leave_room_for_its_response() -> None:
    require_valid_groups([group(6), group(1)], 6, 12)
    require_valid_groups([group(10**6)], 6, None)
    wording = (
        r"^a prompt of 7 tokens and a response of 6 exceed the 12 tokens of the model "
        r"\(max_position_embeddings\); lower data\.max_prompt_length or data\.max_response_length$"
    )
    with pytest.raises(UserError, match=wording):
        require_valid_groups([group(6), group(7)], 6, 12)
    wording = (
        r"^a prompt of 7 tokens and a response of 6 exceed the 12 tokens of the engine "
        r"\(max_model_len = actor_rollout_ref\.rollout\.prompt_length \+ response_length\); raise "
        r"data\.max_prompt_length, or set data\.filter_overlong_prompts=True$"
    )
    with pytest.raises(UserError, match=wording):
        require_valid_groups([group(7)], 6, 12, limited_by=ENGINE_LENGTH, fix=FEWER_PROMPTS)


def test_an_empty_prompt_is_named() -> None:
    with pytest.raises(UserError, match="prompt 1 of the batch is empty: it has no tokens"):
        require_valid_groups([group(2), group(0)], 6, 12)


def test_partial_samples_have_to_match_the_sample_ids() -> None:
    require_valid_groups([group(2, samples=2), group(2, samples=2, partial=2)], 6, 12)
    with pytest.raises(ValueError, match="group 0 has 2 sample ids, but 1 partial samples"):
        require_valid_groups([group(2, samples=2, partial=1)], 6, 12)
