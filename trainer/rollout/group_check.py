"""The check of the groups that a rollout engine is asked to generate."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.base.errors import UserError
from trainer.base.length_limit import SHORTER, require_fits
from trainer.rollout.protocol import Group
from trainer.rollout.settings import KEY

MODEL_POSITIONS = "the model (max_position_embeddings)"
ENGINE_LENGTH = f"the engine (max_model_len = {KEY}.prompt_length + response_length)"
FEWER_PROMPTS = "raise data.max_prompt_length, or set data.filter_overlong_prompts=True"


def require_valid_groups(
    groups: Sequence[Group],
    max_response_length: int,
    limit: int | None,
    *,
    limited_by: str = MODEL_POSITIONS,
    fix: str = SHORTER,
) -> None:
    """Raise UserError for an empty prompt and for one that leaves no room for a response of
    ``max_response_length`` tokens within ``limit`` (None: no limit is known).

    Raises ValueError when the partial samples of a group don't match its sample ids.
    """
    for number, group in enumerate(groups):
        length = len(group.prompt_ids)
        if length == 0:
            raise UserError(f"prompt {number} of the batch is empty: it has no tokens")
        require_fits(length, max_response_length, limit, limited_by=limited_by, fix=fix)
        partial = len(group.partial_samples)
        if partial and partial != len(group.sample_ids):
            raise ValueError(
                f"group {number} has {len(group.sample_ids)} sample ids, but {partial} partial "
                "samples"
            )
