from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.data.toy import CharTokenizer, encoder
from trainer.base.errors import UserError
from trainer.data import Encoder, EncodeSettings, Example, to_sft_batch
from trainer.data.encode import require_valid_tokens
from trainer.data.fields import DataRow
from trainer.data.truncate import truncate

IDS = st.lists(st.integers(0, 1000), max_size=60)


@given(IDS, st.integers(1, 40), st.sampled_from(["left", "right", "middle"]))
def test_truncation_keeps_the_limit_and_the_right_ends(
    ids: list[int], limit: int, side: str
) -> None:
    cut = truncate(ids, limit, side)  # type: ignore[arg-type]
    assert len(cut) == min(len(ids), limit)
    if len(ids) <= limit:
        assert cut == ids
    elif side == "left":
        assert cut == ids[len(ids) - limit :]
    elif side == "right":
        assert cut == ids[:limit]
    else:
        head = limit // 2
        assert cut[:head] == ids[:head] and cut[head:] == ids[len(ids) - (limit - head) :]


def sample(prompt: object = "hello", response: str | None = None) -> DataRow:
    return DataRow(
        prompt=prompt, response=response, ground_truth="1", data_source="d", extra_info={}
    )  # type: ignore[arg-type]


def text(ids: list[int] | None) -> str:
    return "".join(map(chr, ids or []))


def test_the_chat_template_wraps_texts_and_messages() -> None:
    e = encoder(system_prompt="Be brief.").encode(sample("hi", "yo"), index=3, file="f", row=4)
    assert text(e.prompt_ids) == "<system>Be brief.<user>hi<assistant>"
    assert text(e.response_ids) == "yo\0"
    assert (e.index, e.file, e.row, e.location) == (3, "f", 4, "f, row 4")
    messages = [{"role": "system", "content": "own"}, {"role": "user", "content": "hi"}]
    e = encoder(system_prompt="Be brief.").encode(sample(messages), index=0, file="f", row=0)
    assert text(e.prompt_ids) == "<system>own\n\nBe brief.<user>hi<assistant>"
    assert e.response_ids is None
    e = encoder(system_prompt="Be brief.").encode(sample(messages[1:]), index=0, file="f", row=0)
    assert text(e.prompt_ids) == "<system>Be brief.<user>hi<assistant>"
    messages[0]["content"] = "Be brief. Be kind."
    e = encoder(system_prompt="Be brief.").encode(sample(messages), index=0, file="f", row=0)
    assert text(e.prompt_ids) == "<system>Be brief. Be kind.<user>hi<assistant>"


def test_a_long_prompt_is_refused_with_what_to_type() -> None:
    with pytest.raises(
        UserError,
        match=r"f, row 9: the prompt has 26 tokens, data.max_prompt_length is 20. "
        r"Type data.max_prompt_length=26, "
        r"data.filter_overlong_prompts=True .* data.truncation=left\|right\|middle",
    ):
        encoder(max_prompt_length=20).encode(sample("123456789"), index=0, file="f", row=9)


def test_truncation_cuts_prompts_on_its_side_and_responses_at_their_end() -> None:
    cuts = [
        ("left", 23, "er>123456789<assistant>"),
        ("right", 23, "<user>123456<assistant>"),
        ("middle", 23, "<user>123459<assistant>"),
        ("right", 18, "<user>1<assistant>"),
        ("middle", 18, "<us6789<assistant>"),
        ("left", 12, "9<assistant>"),
    ]
    for side, limit, expected in cuts:
        e = encoder(max_prompt_length=limit, max_response_length=4, truncation=side).encode(
            sample("123456789", "abcdefg"), index=0, file="f", row=0
        )
        assert text(e.prompt_ids) == expected
        assert text(e.response_ids) == "abcd"  # no end token: a cut answer doesn't teach to stop
        assert e.cut_prompt and e.cut_response


@pytest.mark.parametrize("side", ["left", "right", "middle"])
def test_a_limit_without_room_for_the_assistants_header_is_refused(side: str) -> None:
    with pytest.raises(UserError, match=r"f, row 1: the chat template closes a prompt with 11 tok"):
        encoder(max_prompt_length=11, truncation=side).encode(
            sample("123456789"), index=0, file="f", row=1
        )


def test_a_long_response_is_refused_under_error() -> None:
    with pytest.raises(
        UserError, match=r"f, row 0: the response has 8 tokens .* Type data.max_response_length=8"
    ):
        encoder(max_response_length=7).encode(sample("a", "abcdefg"), index=0, file="f", row=0)


def test_a_response_of_exactly_the_limit_keeps_its_end_token() -> None:
    e = encoder(max_response_length=8).encode(sample("a", "abcdefg"), index=0, file="f", row=0)
    assert text(e.response_ids) == "abcdefg\0"


def test_ids_past_the_vocabulary_and_empty_fields_name_file_and_row() -> None:
    with pytest.raises(
        UserError,
        match=r"f, row 2: the prompt holds token id 228, past the model's vocabulary of 128",
    ):
        encoder(vocabulary=128).encode(sample("ä"), index=0, file="f", row=2)
    empty = Example(
        prompt_ids=[1],
        response_ids=[],
        ground_truth=None,
        data_source="d",
        index=0,
        file="data.jsonl",
        row=7,
    )
    with pytest.raises(UserError, match=r"data.jsonl, row 7: the response has no tokens"):
        require_valid_tokens(empty, 10)


def test_templates_come_from_texts_files_or_the_tokenizer(tmp_path: Path) -> None:
    class Plain(CharTokenizer):
        chat_template = None

    limits = {"max_prompt_length": 9, "max_response_length": 9}
    with pytest.raises(UserError, match=r"has no chat template; set data.chat_template"):
        Encoder(Plain(), EncodeSettings(**limits))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=re.escape("data.chat_template: missing.jinja is neither")):
        encoder(chat_template="missing.jinja")
    (tmp_path / "t.jinja").write_text("{{ broken }}")
    with pytest.raises(
        UserError, match=r"f, row 1: the chat template failed: ValueError: no such variable"
    ):
        encoder(chat_template=str(tmp_path / "t.jinja")).encode(sample(), index=0, file="f", row=1)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 9), min_size=1), st.lists(st.integers(0, 9), min_size=1)),
        min_size=1,
    )
)
def test_the_ragged_batch_holds_every_token_once_and_trains_on_responses_only(
    pairs: list[tuple[list[int], list[int]]],
) -> None:
    batch = to_sft_batch(
        [
            Example(
                prompt_ids=p,
                response_ids=r,
                ground_truth=None,
                data_source="d",
                index=i,
                file="f",
                row=i,
            )
            for i, (p, r) in enumerate(pairs)
        ]
    )
    assert batch.columns["input_ids"].tolist() == [t for p, r in pairs for t in p + r]
    assert batch.columns["loss_mask"].tolist() == [
        m for p, r in pairs for m in [False] * len(p) + [True] * len(r)
    ]
    assert batch.lengths.tolist() == [len(p) + len(r) for p, r in pairs]
    assert batch.rows["prompt_lengths"].tolist() == [len(p) for p, _ in pairs]
    assert batch.rows["ids"].tolist() == list(range(len(pairs)))
    assert batch.columns["input_ids"].dtype == torch.int64


def test_a_batch_for_sft_needs_responses() -> None:
    e = encoder().encode(sample("a"), index=0, file="f", row=5)
    with pytest.raises(ValueError, match="f, row 5 was read without its response"):
        to_sft_batch([e])
