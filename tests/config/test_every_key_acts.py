"""People leave at the first setting that is silently ignored: every key is read by the trainer, or
refused.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLLOWED = {"actor_rollout_ref.actor.clip_ratio"}
"""Keys that act through others, which follow them in conf/config.yaml."""


def source(*folders: str) -> str:
    files = [p for folder in folders for p in (ROOT / folder).rglob("*.py")]
    return "\n".join(p.read_text() for p in files if "schema" not in p.parts)


def test_every_key_is_read_or_checked() -> None:
    keys = [
        line.split("=")[0]
        for line in (ROOT / "tests/config/keys.txt").read_text().splitlines()
        if "=" in line
    ]
    assert len(keys) > 100
    code = source("trainer", "jobs")
    unread = [key for key in keys if not re.search(rf"\b{key.rsplit('.', 1)[-1]}\b", code)]
    assert set(unread) <= FOLLOWED
