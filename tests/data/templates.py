"""Chat templates as models have them, for the tokenizer of ``builtin:tiny``."""

from __future__ import annotations

from functools import cache
from typing import Any

from trainer.models.tiny import CHAT_TEMPLATE, make_tokenizer

ROLES = (
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}{{ '<|assistant|>' }}"
    "{% generation %}{{ m.content + '<|end|>' }}{% endgeneration %}"
    "{%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
"""The template of ``builtin:tiny``, which marks what the assistant wrote."""

THINKING = (
    "{%- set last = namespace(query=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set last.query = loop.index0 %}{% endif %}"
    "{%- endfor %}"
    "{%- for m in messages %}"
    "{%- if m.role == 'assistant' %}"
    "{%- set thought = m.reasoning_content or '' %}"
    "{%- set words = m.content %}"
    "{%- if '</think>' in words %}"
    "{%- set thought = words.split('</think>')[0].split('<think>')[-1].strip() %}"
    "{%- set words = words.split('</think>')[-1].lstrip() %}"
    "{%- endif %}"
    "{{- '<|assistant|>' }}"
    "{%- if loop.index0 > last.query and (loop.last or thought) %}"
    "{{- '<think>\\n' + thought + '\\n</think>\\n\\n' }}"
    "{%- endif %}"
    "{{- words }}"
    "{%- for call in m.tool_calls or [] %}"
    "{{- '<tool_call>' + call.function.name + '</tool_call>' }}"
    "{%- endfor %}"
    "{{- '<|end|>\\n' }}"
    "{%- elif m.role == 'tool' %}"
    "{{- '<|user|><tool_response>' + m.content + '</tool_response><|end|>\\n' }}"
    "{%- else %}{{- '<|' + m.role + '|>' + m.content + '<|end|>\\n' }}"
    "{%- endif %}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|assistant|>' }}"
    "{%- if no_thoughts %}{{- '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
"""As Qwen3's: drops the thoughts of earlier turns, and writes an empty thought into a last turn
that has none, so that the text of earlier turns isn't kept.
"""

PLAIN = CHAT_TEMPLATE


@cache
def tokenizer() -> Any:
    """The tokenizer of ``builtin:tiny``; a call gives no token a special meaning but its own."""
    return make_tokenizer()
