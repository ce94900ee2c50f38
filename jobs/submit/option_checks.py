"""The values that the settings under ``hydra.launcher`` may have. Pure."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from jobs.slurm import seconds
from trainer.base.errors import UserError, shortened
from trainer.base.json_files import is_text
from trainer.base.masking import holds_secret, secret_refused

RANGES = {
    "timeout_min": (1, 366 * 24 * 60),
    "signal_delay_s": (1, 65535),
    "array_parallelism": (1, 4_000_001),
    "max_array_size": (1, 4_000_001),
    "max_preemptions": (-1, 1_000_000),
    "max_num_timeout": (0, 1_000_000),
    "max_node_failures": (0, 1_000_000),
    "max_bad_nodes": (0, 1_000_000),
    "max_crashes": (0, 1_000_000),
    "max_retries": (0, 1_000_000),
    "cpus_per_task": (1, 65535),
    "cpus_per_gpu": (1, 65535),
    "nodes": (1, 65535),
    "gpus_per_node": (0, 65535),
    "tasks_per_node": (1, 65535),
    "gpus_per_task": (0, 65535),
}
"""Whole numbers: lowest and highest value. The highest ones are Slurm's own (16 bits for a signal's
time and for CPUs, MaxArraySize), or a year.
"""
MOST_MEMORY_GB = 1_000_000
_LINE = r"[^\x00-\x1f\x7f]{1,4096}"
_NAMES = r"[\w.,:@+-]{1,1024}"
_HOSTS = r"[\w.,:/\[\]-]{1,65536}"
_MEMORY = r"\d+[KMGTkmgt]?[Bb]?"
_JOB = r"\d+(_(\d+|\*))?(\+\d+)?"
_KIND = r"after(any|burstbuffer|corr|notok|ok)?"
_CONDITION = rf"(singleton|{_KIND}(:{_JOB})+)"
_MAIL = (
    "NONE|BEGIN|END|FAIL|REQUEUE|ALL|INVALID_DEPEND|STAGE_OUT|TIME_LIMIT|TIME_LIMIT_90|"
    "TIME_LIMIT_80|TIME_LIMIT_50|ARRAY_TASKS"
)
FORMS: dict[str, tuple[str, str]] = {
    "sweep": (_LINE, "a name in one line"),
    "ledger": (_LINE, "a path in one line"),
    "submitit_folder": (_LINE, "a path in one line"),
    "name": (_LINE, "a name in one line"),
    "comment": (_LINE, "a text in one line"),
    "partition": (_NAMES, "a partition's name, or several with commas"),
    "account": (_NAMES, "an account's name"),
    "qos": (_NAMES, "the name of a quality of service"),
    "wckey": (_NAMES, "a name"),
    "gres": (r"[\w.,:/=()*+-]+", "generic resources, e.g. gpu:h100:8"),
    "mem_per_gpu": (_MEMORY, "a size such as 40G"),
    "mem_per_cpu": (_MEMORY, "a size such as 4G"),
    "constraint": (r"[\w.,:&|!*()\[\]=+-]+", "features of nodes, e.g. a100&ib"),
    "exclude": (_HOSTS, "nodes, e.g. n[1-4,7]"),
    "nodelist": (_HOSTS, "nodes, e.g. n[1-4,7]"),
    "dependency": (
        rf"{_CONDITION}([,?]{_CONDITION})*",
        "Slurm's conditions, e.g. afterok:123:124 or singleton",
    ),
    "mail_type": (rf"({_MAIL})(,({_MAIL}))*", "events, e.g. END,FAIL"),
    "mail_user": (r"[^\s\x00-\x1f\x7f]{1,320}", "an address"),
}
"""Texts: what they must match whole, and that in words."""
LISTS = ("setup", "srun_args")
"""Lists of texts, one line each."""


def require_no_secret(key: str, value: Any) -> None:
    """Raise UserError when a text of ``value``, which goes into a script or to Slurm, is a secret
    in clear text.
    """
    texts = value if isinstance(value, list | tuple) else [value]
    if isinstance(value, Mapping):
        texts = [f"{name}={item}" for name, item in value.items()]
    for text in texts:
        if isinstance(text, str) and holds_secret(text):
            raise UserError(secret_refused(key, text))


def problem_of(values: Mapping[str, Any]) -> str | None:
    """A message for the first value that is outside of its range or has another form; None when
    all are fine. ``values``: of the settings by name, None for one that isn't set.
    """
    for name, value in values.items():
        if value is None:
            continue
        require_no_secret(f"hydra.launcher.{name}", value)
        expected = _expected(name, value)
        if expected is not None:
            return f"hydra.launcher.{name}={_shown(value)} must be {expected}."
    return None


def _shown(value: Any) -> str:
    """A value for a message, with quotes and escapes where one would not see it otherwise."""
    text = str(value)
    if isinstance(value, list) or not text.isprintable() or text.strip() != text or not text:
        text = repr(value)
    return shortened(text)


def _expected(name: str, value: Any) -> str | None:
    """What the value must be; None when it is."""
    if name == "timeout_min" and isinstance(value, str) and re.search("[-:]", value):
        limit_s = seconds(value)  # Slurm's form of a time
        if limit_s is not None:
            return f"in minutes: type timeout_min={math.ceil(limit_s / 60)}"
    if name in RANGES:
        low, high = RANGES[name]
        whole = isinstance(value, int) and not isinstance(value, bool)
        fits = whole and low <= value <= high
        # The highest values are so high that only one beyond them asks for a word.
        beyond = f", and at most {high}" if whole and value > high else ""
        return None if fits else f"a whole number of at least {low}{beyond}"
    if name == "mem_gb":
        number = isinstance(value, int | float) and not isinstance(value, bool)
        fits = number and math.isfinite(value) and 0 < value <= MOST_MEMORY_GB
        return None if fits else f"a number above 0, at most {MOST_MEMORY_GB}"
    if name in LISTS:
        lines = value if isinstance(value, list | tuple) else [None]
        fits = all(isinstance(line, str) and re.fullmatch(_LINE, line) for line in lines)
        return None if fits else "a list of texts, each in one line"
    if name in FORMS:
        pattern, words = FORMS[name]
        fits = isinstance(value, str) and re.fullmatch(pattern, value, re.ASCII) is not None
        if name in ("sweep", "name", "comment", "ledger", "submitit_folder"):
            fits = fits and is_text(value) and value.strip() != ""
        return None if fits else words
    return None
