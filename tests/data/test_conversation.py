"""Conversations to learn from: every token of the assistant is trained, and no other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.data.templates import PLAIN, ROLES, THINKING, tokenizer
from trainer.base.errors import UserError
from trainer.data import Encoder, EncodeSettings, Example, FileDataset, Keys, to_sft_batch

CHAT = [
    {"role": "system", "content": "Add."},
    {"role": "user", "content": "What is 6 + 16?"},
    {"role": "assistant", "content": "#### 22"},
    {"role": "user", "content": "And 1 more?"},
    {"role": "assistant", "content": " 22 + 1 = 23\n#### 23"},
    {"role": "tool", "content": "right"},
    {"role": "assistant", "content": "Good."},
]


def encode(tmp_path: Path, row: dict[str, Any], template: str = PLAIN, **settings: Any) -> Example:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps(row) + "\n")
    limits = {"max_prompt_length": 100, "max_response_length": 200}
    encoder = Encoder(tokenizer(), EncodeSettings(chat_template=template, **{**limits, **settings}))
    prompt = "messages" if "messages" in row else "prompt"
    keys = Keys(prompt=prompt, response="completion", answer_required=False)
    return FileDataset([file], keys, encoder)[0]


def reference(messages: list[dict[str, Any]], template: str, first: int) -> list[tuple[int, bool]]:
    """The whole conversation rendered and tokenized at once; a token is trained when its characters
    are between an assistant's header and the end token that follows, in messages from ``first`` on.
    """
    text = tokenizer().apply_chat_template(
        messages, chat_template=template, tokenize=False, add_generation_prompt=False
    )
    spans = []
    start = 0
    for k, message in enumerate(messages):
        end = text.index("<|end|>", start) + len("<|end|>")
        if message["role"] == "assistant" and k >= first:
            spans.append((text.index("<|assistant|>", start) + len("<|assistant|>"), end))
        start = end
    encoded = tokenizer()(text, return_offsets_mapping=True, add_special_tokens=False)
    return [
        (token, any(begin <= left and right <= end for begin, end in spans))
        for token, (left, right) in zip(
            encoded["input_ids"], encoded["offset_mapping"], strict=True
        )
    ]


def trained(example: Example) -> list[tuple[int, bool]]:
    """(token, whether it is trained), as the batch has them."""
    batch = to_sft_batch([example])
    ids = batch.columns["input_ids"].tolist()
    return list(zip(ids, batch.columns["loss_mask"].tolist(), strict=True))


@pytest.mark.parametrize("template", [PLAIN, ROLES], ids=["plain", "generation markers"])
def test_a_conversation_trains_on_all_turns_of_the_assistant(tmp_path: Path, template: str) -> None:
    example = encode(tmp_path, {"messages": CHAT}, template)
    assert trained(example) == reference(CHAT, template, 2)
    assert sum(mask for _, mask in trained(example)) > 10
    assert tokenizer().decode(example.prompt_ids).endswith("6 + 16?<|end|><|assistant|>")


@pytest.mark.parametrize("template", [PLAIN, ROLES], ids=["plain", "generation markers"])
def test_a_completion_of_messages_trains_on_its_own_turns(tmp_path: Path, template: str) -> None:
    row = {"prompt": CHAT[:4], "completion": CHAT[4:]}
    assert trained(encode(tmp_path, row, template)) == reference(CHAT, template, 4)
    text = {"prompt": "1 + 1?", "completion": [{"role": "assistant", "content": "2"}]}
    plain = {"prompt": "1 + 1?", "completion": "2"}
    assert trained(encode(tmp_path, text, template)) == trained(encode(tmp_path, plain, template))


def test_a_chosen_conversation_repeats_its_prompt(tmp_path: Path) -> None:
    """As data sets of preferences have it."""
    row = {"prompt": "1 + 1?", "completion": [{"role": "user", "content": "1 + 1?"}, CHAT[2]]}
    expected = {"prompt": "1 + 1?", "completion": [CHAT[2]]}
    assert trained(encode(tmp_path, row)) == trained(encode(tmp_path, expected))


def test_a_turn_of_weight_0_is_context(tmp_path: Path) -> None:
    light = [dict(message) for message in CHAT]
    light[2]["weight"] = 0
    light[4]["weight"] = 1
    example = encode(tmp_path, {"messages": light})
    assert [token for token, _ in trained(example)] == [t for t, _ in reference(CHAT, PLAIN, 2)]
    assert [mask for _, mask in trained(example)][len(example.prompt_ids) :] == [
        mask for _, mask in reference(CHAT, PLAIN, 4)
    ][len(example.prompt_ids) :]
    for template, message in ((PLAIN, "every turn has weight 0"), (ROLES, "a weight of 0 can't")):
        with pytest.raises(UserError, match=message):
            encode(tmp_path, {"messages": [CHAT[1], {**CHAT[2], "weight": 0}]}, template)


def test_what_is_said_after_the_last_answer_is_left_out(tmp_path: Path) -> None:
    more = [*CHAT, {"role": "user", "content": "Thanks"}]
    assert trained(encode(tmp_path, {"messages": more})) == reference(CHAT, PLAIN, 2)


def test_turns_are_appended_where_the_template_changes_earlier_ones(tmp_path: Path) -> None:
    """As in a rollout: the model has seen its own thoughts, and no empty ones."""
    turns = [
        {"role": "user", "content": "6 + 16?"},
        {"role": "assistant", "content": "<think>\nsix\n</think>\n\n22"},
        {"role": "user", "content": "Sure?"},
        {"role": "assistant", "content": "Yes"},
    ]
    example = encode(tmp_path, {"messages": turns}, THINKING)
    whole = "".join(tokenizer().decode([token]) for token, _ in trained(example))
    assert whole == (
        "<|user|>6 + 16?<|end|>\n<|assistant|><think>\nsix\n</think>\n\n22<|end|>\n"
        "<|user|>Sure?<|end|>\n<|assistant|>Yes<|end|>"
    )
    learned = "".join(tokenizer().decode([token]) for token, mask in trained(example) if mask)
    assert learned == "<think>\nsix\n</think>\n\n22<|end|>Yes<|end|>"


def test_tool_calls_and_thoughts_are_written_by_the_template(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "add", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "6 + 16?"},
        {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [call]},
        {"role": "tool", "content": "22"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "22"},
        {"role": "assistant", "content": "22"},
    ]
    example = encode(tmp_path, {"messages": turns}, THINKING)
    learned = "".join(tokenizer().decode([token]) for token, mask in trained(example) if mask)
    without = {"template_kwargs": {"no_thoughts": True}}
    with pytest.raises(UserError, match="doesn't write this turn behind its header"):
        encode(tmp_path, {"messages": turns}, THINKING, **without)
    turns[1].pop("reasoning_content")
    other = encode(tmp_path, {"messages": turns}, THINKING, **without)
    plain = "".join(tokenizer().decode([token]) for token, mask in trained(other) if mask)
    called = "<tool_call>add</tool_call><|end|>"
    assert learned == f"<think>\nhm\n</think>\n\n{called}{called}22<|end|>"
    assert plain == f"{called}{called}22<|end|>"
    assert "<|user|><tool_response>22</tool_response><|end|>\n<|assistant|>" in tokenizer().decode(
        example.response_ids
    )


def test_a_conversation_that_is_too_long_is_refused_or_cut(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"row 1: the response has \d+ tokens .*Type data.max_resp"):
        encode(tmp_path, {"messages": CHAT}, max_response_length=20)
    cut = encode(tmp_path, {"messages": CHAT}, max_response_length=20, truncation="right")
    assert trained(cut) == reference(CHAT, PLAIN, 2)[: len(cut.prompt_ids) + 20]
    assert cut.cut_response and not cut.cut_prompt


@pytest.mark.parametrize(
    ("row", "template", "message"),
    [
        (
            {"messages": CHAT[2:]},
            PLAIN,
            "field 'messages' is empty; fill it in or remove the row|no user message with text",
        ),
        ({"messages": CHAT[:2]}, PLAIN, r"no field 'completion' \(data.response_key\)"),
        ({"prompt": "a", "completion": CHAT[:3]}, PLAIN, "begins with a message of the system"),
        ({"prompt": "a", "completion": 3}, PLAIN, "field 'completion' must be a text, found int"),
        (
            {"messages": CHAT},
            "{% for m in messages %}{{ m.content }}{% endfor %}",
            r"the chat template doesn't close the assistant's turn with the end token <\|end\|>",
        ),
        (
            {"messages": CHAT},
            "{% if messages[0].role == 'assistant' %}{% generation %}{% endgeneration %}{% endif %}"
            + PLAIN,
            "the chat template marks nothing as the assistant's",
        ),
    ],
)
def test_conversations_that_cannot_be_built_name_row_and_reason(
    tmp_path: Path, row: dict[str, Any], template: str, message: str
) -> None:
    with pytest.raises(UserError, match=r"d.jsonl, row 1: .*" + f"({message})"):
        encode(tmp_path, row, template)
