"""A chat template's code can take neither time nor memory without bound, nor hold up a stop."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerBase

from trainer.base import forked, signals
from trainer.base.errors import UserError
from trainer.data import rendering
from trainer.data.chat_template import ChatTemplate
from trainer.data.rendering import TemplateFailed
from trainer.models.load import load_tokenizer, resolve

QUESTION = [{"role": "user", "content": "1 + 1 = ?"}]
ENDLESS = (
    "{{ 10 ** (10 ** 10) }}",  # one operation in C, which hears no signal
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(resolve("builtin:tiny"), "builtin:tiny")


def render(tokenizer: PreTrainedTokenizerBase, template: str) -> str:
    return ChatTemplate(tokenizer, template).render(QUESTION, open_next=True)


@pytest.mark.parametrize("template", ENDLESS)
def test_a_template_that_never_ends(
    tokenizer: PreTrainedTokenizerBase, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "MOST_SECONDS", 0.3)
    with pytest.raises(UserError, match=r"1 messages within 0 s: it never ends; set data\.chat"):
        render(tokenizer, template)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ 'a' * 10 ** 12 }}", "wants more than 1024 MiB of memory for 1 messages; set data"),
        ("{{ ('a' * 10 ** 6) | replace('a', 'b' * 10 ** 5) }}", "wants more than 1024 MiB"),
        ("{{ 'a' * 4 * 10 ** 7 }}", "writes 40000000 characters for 1 messages; set data.chat"),
    ],
)
def test_a_template_that_takes_too_much(
    tokenizer: PreTrainedTokenizerBase, template: str, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        render(tokenizer, template)


def test_an_error_of_the_template_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    with pytest.raises(TemplateFailed) as error:
        render(tokenizer, "{{ raise_exception('roles must alternate') }}")
    assert error.value.reason == "TemplateError: roles must alternate"
    assert str(error.value) == f"failed: {error.value.reason}"


def test_texts_are_those_of_the_tokenizer_and_one_process_writes_them(
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    template = ChatTemplate(tokenizer)
    before = set(forked._live)
    for content in ("a", "é日本語", "\ud800", "x" * 200_000):
        messages = [{"role": "user", "content": content}]
        expected = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        assert template.render(messages, open_next=True) == expected
    (worker,) = set(forked._live) - before
    process = Path(f"/proc/{worker.pid}")
    assert process.exists()
    del template
    assert not process.exists() and worker not in forked._live


def test_a_stop_is_heard_meanwhile(
    tokenizer: PreTrainedTokenizerBase, monkeypatch: pytest.MonkeyPatch
) -> None:
    template = ChatTemplate(tokenizer, "{{ 10 ** (10 ** 10) }}")
    monkeypatch.setattr(signals._request, "cause", None)
    timer = threading.Timer(0.2, lambda: signals._request.begin("TERM"))
    timer.start()
    began = time.monotonic()
    with pytest.raises(signals.StopRequested):
        template.render(QUESTION, open_next=True)
    assert time.monotonic() - began < rendering.MOST_SECONDS / 2


def test_a_forked_process_renders_by_another_one(tokenizer: PreTrainedTokenizerBase) -> None:
    template = ChatTemplate(tokenizer)
    expected = template.render(QUESTION, open_next=True)
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        same = template.render(QUESTION, open_next=True) == expected
        forked._end_all()
        os._exit(7 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert template.render(QUESTION, open_next=True) == expected
