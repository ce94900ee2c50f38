"""Rows that would train on something else than they say: read as they are meant, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.data.templates import tokenizer
from tests.data.toy import CharTokenizer, encoder
from trainer.base.errors import UserError
from trainer.data import Encoder, EncodeSettings, Example, FileDataset, Keys
from trainer.rewards.maths import maths
from trainer.run.build import template_warnings

QUESTION = {"role": "user", "content": "1+1?"}
PARTS = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1?"}]


def read(tmp_path: Path, row: dict[str, Any], *, keys: Keys | None = None, **tools: Any) -> Example:
    file = tmp_path / "d.jsonl"
    file.write_text(json.dumps({"answer": "2", **row}) + "\n")
    return FileDataset([file], keys or Keys(), tools.pop("encoder", None) or encoder(**tools))[0]


@pytest.mark.parametrize(
    "prompt",
    [
        "1+1?",
        [QUESTION],
        [{"role": "user", "content": PARTS}],
        [{"role": "user", "content": ["1+", "1?"]}],
        json.dumps([QUESTION]),
        " " + json.dumps([{"role": "user", "content": PARTS}], indent=1),
        json.dumps(QUESTION),
    ],
)
def test_a_prompt_is_the_same_in_every_form(tmp_path: Path, prompt: Any) -> None:
    example = read(tmp_path, {"prompt": prompt})
    assert "".join(map(chr, example.prompt_ids)) == "<user>1+1?<assistant>"


def test_parts_in_parquet_have_null_fields(tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "1+1?", "image": None}]
    row = {"prompt": [{"role": "user", "content": parts}], "answer": "2", "images": []}
    table = pa.Table.from_pylist([row, {**row, "images": ["a.png"]}])
    pq.write_table(table, tmp_path / "d.parquet")
    data = FileDataset([tmp_path / "d.parquet"], Keys(), encoder())
    assert "".join(map(chr, data[0].prompt_ids)) == "<user>1+1?<assistant>"
    with pytest.raises(UserError, match=r"d.parquet, row 1: field 'images' is not empty"):
        data[1]


@pytest.mark.parametrize("text", ["[1, 2, 3]: sort them", "[1, 2, 3]", '{"role": 1}', "[]", "{x}"])
def test_other_texts_with_brackets_stay_texts(tmp_path: Path, text: str) -> None:
    example = read(tmp_path, {"prompt": text})
    assert "".join(map(chr, example.prompt_ids)) == f"<user>{text}<assistant>"


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "a", "images": ["a.png"]}, "field 'images' is not empty, and only text"),
        ({"prompt": "a", "video": {"path": "a.mp4"}}, "field 'video' is not empty"),
        ({"prompt": "a", "tools": [{"name": "add"}]}, "field 'tools' is not empty, and is not"),
        ({"prompt": "<image>What is it?"}, "field 'prompt' has <image> in its text"),
        ({"prompt": [{"role": "user", "content": "a <video>"}]}, "message 0 has <video> in its"),
        (
            {"prompt": [{"role": "user", "content": [*PARTS, {"type": "image"}]}]},
            "message 0 has a part of type 'image', and only text can be trained on",
        ),
        ({"prompt": [{"role": "user", "content": [3]}]}, "a part must be a text, found int"),
        ({"prompt": [{"role": "user", "content": 3}]}, "content must be a text, found int"),
        ({"prompt": [{"role": 3, "content": "a"}]}, "the role must be a text, found int"),
        ({"prompt": [{"from": "human", "value": "a"}]}, "write 'from' as 'role'"),
        ({"prompt": json.dumps([{"from": "human", "value": "a"}])}, "write 'from' as 'role'"),
        ({"prompt": str([QUESTION])}, "is the text of a Python list of messages"),
        (
            {"prompt": json.dumps([QUESTION, {"role": "assistant", "content": "2"}])},
            "ends with an assistant message",
        ),
    ],
)
def test_what_cannot_be_trained_on_as_it_is_meant_is_refused(
    tmp_path: Path, row: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=r"d\.jsonl, row 1: .*" + message):
        read(tmp_path, row)


@pytest.mark.parametrize(
    ("truth", "responses"),
    [
        (["2", 3], {"#### 2": 1, "#### 3": 1, "#### 4": 0, "so \\boxed{3}": 1, "so \\boxed{4}": 0}),
        (["#### 1,000", "\\frac{1}{2}"], {"#### 1000": 1, "#### 0.5": 1, "#### 2": 0}),
        (2.0, {"#### 2": 1}),
        ("{1, 2}", {"#### {2, 1}": 1}),
    ],
)
def test_the_rule_takes_one_of_several_answers(
    tmp_path: Path, truth: Any, responses: dict[str, int]
) -> None:
    row = {"prompt": "a", "reward_model": {"ground_truth": truth}}
    keys = Keys(answer="reward_model.ground_truth")
    ground_truth = read(tmp_path, row, keys=keys).ground_truth
    for response, score in responses.items():
        assert maths("d", response, ground_truth) == score


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ({"target": ["2"]}, "an object with target, .*: set data.answer_key=answer.target"),
        ({"a": 1, "b": 2}, "an object with a, b"),
        ('{"inputs": ["1"], "outputs": ["2"]}', "an object with inputs, outputs"),
        ([], "an empty list"),
        ([["2"]], "a list of lists"),
        (["2", None], "nothing"),
        (["2", " "], "nothing"),
        (float("inf"), "inf"),
    ],
)
def test_a_truth_that_no_response_could_equal_is_refused(
    tmp_path: Path, truth: Any, message: str
) -> None:
    with pytest.raises(UserError, match=r"d\.jsonl, row 1: field 'answer' holds " + message):
        read(tmp_path, {"prompt": "a", "answer": truth})


@pytest.mark.parametrize("truth", ["so\n#### 1,000", {"target": ["2"]}, [], None])
def test_a_users_function_gets_the_truth_as_it_is(tmp_path: Path, truth: Any) -> None:
    keys = Keys(answer_required=False, maths_rule=False)
    assert read(tmp_path, {"prompt": "a", "answer": truth}, keys=keys).ground_truth == truth


def test_who_judges_does_not_change_the_samples(tmp_path: Path) -> None:
    file = tmp_path / "d.jsonl"
    file.write_text('{"prompt": "a", "answer": "1"}\n')
    digests = {
        FileDataset([file], Keys(maths_rule=rule), encoder()).fingerprint.digest
        for rule in (True, False)
    }
    assert len(digests) == 1


@pytest.mark.parametrize(
    "prompt",
    [
        "<|user|>What is 1 + 1?<|end|><|assistant|>",
        "\n<|user|>What is 1 + 1?",
        [{"role": "user", "content": "<|user|>1 + 1?<|end|><|assistant|>"}],
    ],
)
def test_a_templated_prompt_is_not_templated_again(tmp_path: Path, prompt: Any) -> None:
    settings = {"max_prompt_length": 50, "max_response_length": 50}
    with pytest.raises(UserError, match=r"row 1: the prompt begins as the chat template writes it"):
        read(tmp_path, {"prompt": prompt}, encoder=Encoder(tokenizer(), EncodeSettings(**settings)))
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    as_it_is = Encoder(tokenizer(), EncodeSettings(chat_template=plain, **settings))
    example = read(tmp_path, {"prompt": prompt}, encoder=as_it_is)
    text = prompt if isinstance(prompt, str) else prompt[0]["content"]
    assert tokenizer().decode(example.prompt_ids) == text


def test_words_of_a_template_without_special_tokens_count_as_its_wrapper(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="begins as the chat template writes it"):
        read(tmp_path, {"prompt": "<user>1+1?<assistant>"})
    read(tmp_path, {"prompt": "<user> is a tag; what is 1+1?"})


@pytest.mark.parametrize("response", ["2", "2<|end|>", "2<|end|>\n", "2<|end|> <|end|>"])
def test_a_response_has_one_end_token(tmp_path: Path, response: str) -> None:
    settings = EncodeSettings(max_prompt_length=50, max_response_length=50)
    example = read(
        tmp_path,
        {"prompt": "1 + 1?", "response": response},
        keys=Keys(response="response"),
        encoder=Encoder(tokenizer(), settings),
    )
    assert tokenizer().decode(example.response_ids) == "2<|end|>"


class Base(CharTokenizer):
    """The tokenizer of a base model: no template; a text begins with character 1."""

    chat_template = None
    bos_token_id = 1
    bos_token = "\x01"

    def __init__(self, *, begins: bool) -> None:
        self.begins = begins

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        ids = [ord(c) for c in text]
        return {"input_ids": [1, *ids] if self.begins and add_special_tokens else ids}


def test_the_suggested_template_begins_as_the_tokenizer_does() -> None:
    settings = EncodeSettings(max_prompt_length=9, max_response_length=9)
    with pytest.raises(UserError, match=r'such as "{{ bos_token }}{% for m in messages %}'):
        Encoder(Base(begins=True), settings)
    with pytest.raises(UserError, match=r'such as "{% for m in messages %}{{ m.content }}'):
        Encoder(Base(begins=False), settings)


def test_a_template_without_the_token_that_begins_a_text_is_a_warning() -> None:
    data: Any = SimpleNamespace(chat_template="{own}", apply_chat_template_kwargs={})
    (warning,) = template_warnings(data, Base(begins=True))
    assert "doesn't write \x01" in warning
    assert template_warnings(data, Base(begins=False)) == []
    data.chat_template = None
    assert template_warnings(data, Base(begins=True)) == []
