"""The check that a prompt and its response fit into what a model or a rollout engine takes."""

from __future__ import annotations

from trainer.base.errors import UserError

SHORTER = "lower data.max_prompt_length or data.max_response_length"


def require_fits(
    prompt: int, response: int, limit: int | None, *, limited_by: str, fix: str = SHORTER
) -> None:
    """Raise UserError when ``prompt`` and ``response`` together exceed ``limit``, all in tokens.

    ``limit`` None: nothing is known of one. ``limited_by`` names what sets the limit, ``fix`` what
    the user can do about it.
    """
    if limit is not None and prompt + response > limit:
        raise UserError(
            f"a prompt of {prompt} tokens and a response of {response} exceed the {limit} tokens "
            f"of {limited_by}; {fix}"
        )
