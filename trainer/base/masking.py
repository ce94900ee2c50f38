"""Secrets in texts that people or records get: the one place that knows what looks like one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

MASK = "***"
_ENV_NAME = (
    r"[A-Za-z0-9_]*(?:API_?KEY|ACCESS_?KEY|SECRET_?KEY|PRIVATE_?KEY|TOKEN|SECRET|PASSWORD|PASSWD|"
    r"PASSPHRASE|CREDENTIALS?)"
)
_VALUE = r"""(?:"[^"]*"|'[^']*'|[^\s,;&'"\]})]+)"""
_ASSIGNMENT = re.compile(rf"(?i)(?<![A-Za-z0-9_])(-{{0,2}}{_ENV_NAME})(\s*[=:]\s*)({_VALUE})")
_URL = re.compile(r"(?i)\b([a-z][a-z0-9+.-]*://)([^\s/@'\"]*):([^\s/@'\"]+)@")
_BEARER = re.compile(r"(?i)\b(bearer|basic)(\s+)([a-z0-9._~+/=-]{8,})")
_SHAPES = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|"
    r"glpat-[A-Za-z0-9_-]{16,}|AKIA[0-9A-Z]{16}|xox[abprs]-[A-Za-z0-9-]{10,}|"
    r"wandb_v1_[A-Za-z0-9_]{16,})"
)
_KEYS = ("api_key", "password", "passwd", "secret", "secret_key", "access_key", "private_key")
_TOKEN_KEYS = ("hf_token", "auth_token", "access_token", "api_token", "credentials")
_REFERENCE = re.compile(r"""["']?(\$|`|\*\*\*)""")


def mask(text: str) -> str:
    """``text`` with ``***`` in the place of passwords in URLs, of values that are assigned to names
    such as WANDB_API_KEY or HF_TOKEN, and of tokens that are known by their form.
    """
    text = _URL.sub(rf"\1\2:{MASK}@", text)
    text = _BEARER.sub(rf"\1\2{MASK}", text)
    text = _ASSIGNMENT.sub(_masked_assignment, text)
    return _SHAPES.sub(MASK, text)


def mask_values(value: Any) -> Any:
    """``value`` with all its texts masked, and whole the values of keys that name a secret."""
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: _mask_of_key(str(key), item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(mask_values(item) for item in value)
    return value


def holds_secret(text: str) -> bool:
    """Whether ``text`` holds a secret itself, not only the name of a variable that does."""
    return mask(text) != text


def secret_refused(key: str, text: str) -> str:
    """What to do instead of giving the secret in ``text`` to ``key``."""
    return (
        f"{key} holds a secret ({mask(text)}), which would stand in scripts and records: export "
        "the variable in the shell that submits, whose environment the job gets, and leave it out "
        "here"
    )


def _mask_of_key(key: str, value: Any) -> Any:
    if value and key.lower().endswith((*_KEYS, *_TOKEN_KEYS)) and not isinstance(value, Mapping):
        return MASK
    return mask_values(value)


def _masked_assignment(match: re.Match[str]) -> str:
    name, sign, value = match.groups()
    if _REFERENCE.match(value) or not _names_a_secret(name):
        return match[0]
    return f"{name}{sign}{MASK}"


def _names_a_secret(name: str) -> bool:
    """Whether an assigned name is that of a secret: pad_token, eos_token and their like are not."""
    bare = name.lstrip("-")
    if bare.lower().endswith("token") and bare != bare.upper():
        return bare.lower().endswith(_TOKEN_KEYS)
    return True
