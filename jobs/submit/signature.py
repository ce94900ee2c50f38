"""The signature of a config: two runs with equal signatures compute the same thing."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

EXCLUDED_KEYS = (
    ("cluster",),
    ("container",),
    ("trainer", "default_local_dir"),
    ("trainer", "logger"),
    ("trainer", "accept_changed_files"),
)
"""Keys that say where and how a run is made, not what it computes."""


def signature_of(config: Mapping[str, Any]) -> str:
    """SHA-256 (first 16 hex digits) of the resolved config without ``EXCLUDED_KEYS``.

    The order of the keys does not matter.
    """
    pruned = {key: value for key, value in config.items() if (key,) not in EXCLUDED_KEYS}
    for path in EXCLUDED_KEYS:
        if len(path) == 2 and isinstance(pruned.get(path[0]), Mapping):
            pruned[path[0]] = {k: v for k, v in pruned[path[0]].items() if k != path[1]}
    text = json.dumps(pruned, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
