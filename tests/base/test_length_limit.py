"""A prompt and its response have to fit; every place that checks it says so in the same words."""

from __future__ import annotations

import pytest

from trainer.base.errors import UserError
from trainer.base.length_limit import require_fits


def test_exactly_the_limit_fits_and_an_unknown_limit_refuses_nothing() -> None:
    require_fits(5, 7, 12, limited_by="the model")
    require_fits(10**9, 10**9, None, limited_by="the model")


def test_the_message_names_both_lengths_the_limit_its_origin_and_the_fix() -> None:
    wording = (
        r"^a prompt of 6 tokens and a response of 7 exceed the 12 tokens of builtin:tiny "
        r"\(max_position_embeddings\); lower data\.max_prompt_length or data\.max_response_length$"
    )
    with pytest.raises(UserError, match=wording):
        require_fits(6, 7, 12, limited_by="builtin:tiny (max_position_embeddings)")
