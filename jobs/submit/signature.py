"""The signature of a config: two runs with equal signatures compute the same thing."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from typing import Any

from jobs.submit.cluster_config import Container

EXCLUDED_KEYS = (
    ("cluster",),
    ("container",),  # its image apart
    ("trainer", "default_local_dir"),
    ("trainer", "logger"),
    ("trainer", "accept_changed_files"),
)
"""Keys that say where and how a run is made, not what it computes."""


def image_name(container: Container) -> str | None:
    """The image that a job runs in: its software is a part of what is computed. None without one.

    A file that is built anew under its name is the same image: a run that failed goes on in it.
    """
    if container.runtime == "none" or container.image is None:
        return None
    image = container.image
    if container.runtime == "apptainer":
        image = os.path.abspath(os.path.expanduser(image))
    return f"{image}@{container.digest}" if container.digest else image


def signature_of(config: Mapping[str, Any], image: str | None = None) -> str:
    """SHA-256 (first 16 hex digits) of the resolved config without ``EXCLUDED_KEYS``, and of the
    image's name.

    The order of the keys does not matter.
    """
    pruned = {key: value for key, value in config.items() if (key,) not in EXCLUDED_KEYS}
    for path in EXCLUDED_KEYS:
        if len(path) == 2 and isinstance(pruned.get(path[0]), Mapping):
            pruned[path[0]] = {k: v for k, v in pruned[path[0]].items() if k != path[1]}
    if image is not None:
        pruned["container"] = image
    text = json.dumps(pruned, sort_keys=True, separators=(",", ":"), default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
