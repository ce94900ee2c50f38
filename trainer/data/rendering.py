"""The code of a chat template, run in a process that bounds its time and memory.

A template comes with the model, and a single operation of it can take for ever
(``{{ 10 ** 10 ** 10 }}``) or ask for more memory than there is. Nothing ends that within a process:
it would hear no signal, and no other thread would run.
"""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from trainer.base.errors import UserError, typed_line
from trainer.base.forked import Forked, WorkerDied, WorkerSilent
from trainer.data.messages import Message

MOST_SECONDS = 30.0
"""A template takes less than a millisecond."""
MOST_BYTES = 1 << 30
"""Memory that a template may take."""
MOST_CHARACTERS = 1 << 25
"""Of a rendered text: several times the longest context of any model."""
_ADVICE = "set data.chat_template to another one"


class TemplateError(ValueError):
    """The template does something that turns can't be built with; the message says what."""


class TemplateFailed(TemplateError):
    """The template's own code raised ``reason``, the error's type and text."""

    def __init__(self, reason: str) -> None:
        super().__init__(f"failed: {reason}")
        self.reason = reason


class _Request(NamedTuple):
    messages: list[Message]
    options: Mapping[str, Any]
    """Of ``apply_chat_template``."""


class _Rendered(NamedTuple):
    value: Any
    """A text, or token ids and the assistant's mask."""
    error: str | None = None
    """What the template raised: type and text."""


class Renderer:
    """Applies the chat template of ``tokenizer`` in a forked process of its own, which is started
    at the first use. A process that is forked meanwhile starts another one.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._owner = os.getpid()
        self._lock = threading.Lock()
        self._worker: Forked[_Request, _Rendered] | None = None

    def render(self, messages: Sequence[Message], **options: Any) -> Any:
        """What ``apply_chat_template`` returns for ``options``: a text, or with ``return_dict``
        token ids and the assistant's mask.

        Raises TemplateFailed for an error of the template's code, and UserError when it takes more
        time or memory than any template needs.
        """
        if self._owner != os.getpid():
            self._owner = os.getpid()
            self._lock = threading.Lock()
            self._worker = None
        with self._lock:
            rendered = self._ask(_Request(list(messages), options))
        if rendered.error is not None:
            raise TemplateFailed(rendered.error)
        return rendered.value

    def _ask(self, request: _Request) -> _Rendered:
        if self._worker is None:
            serve = partial(_render, self._tokenizer)
            self._worker = Forked(serve, "chat template", memory_bytes=MOST_BYTES)
            weakref.finalize(self, Forked.close, self._worker)
        count = len(request.messages)
        answered = False
        try:
            self._worker.send(request)
            rendered = self._worker.receive(MOST_SECONDS)
            answered = True
        except UserError:
            answered = True
            raise
        except WorkerSilent:
            reason = f"has not rendered {count} messages within {MOST_SECONDS:.0f} s: it never ends"
            raise UserError(f"the chat template {reason}; {_ADVICE}") from None
        except WorkerDied as e:
            raise UserError(f"the chat template ended its process ({e}); {_ADVICE}") from e
        finally:
            if not answered:  # one that is asked to stop meanwhile would answer later
                self._worker.close()
                self._worker = None
        return rendered


def _render(tokenizer: Any, request: _Request) -> _Rendered:
    """In the process: apply the template."""
    count = len(request.messages)
    try:
        value = tokenizer.apply_chat_template(request.messages, **request.options)
        if request.options.get("return_dict"):
            value = list(value["input_ids"]), [bool(m) for m in value["assistant_masks"]]
    except MemoryError:
        raise UserError(
            f"the chat template wants more than {MOST_BYTES >> 20} MiB of memory for {count} "
            f"messages; {_ADVICE}"
        ) from None
    except Exception as e:  # Jinja runs the template's own code, which may raise anything
        return _Rendered(None, typed_line(e))
    if len(value) > MOST_CHARACTERS:
        raise UserError(
            f"the chat template writes {len(value)} characters for {count} messages; {_ADVICE}"
        )
    return _Rendered(value)
