"""Cutting token lists to a length."""

from __future__ import annotations

from typing import Literal

Truncation = Literal["error", "left", "right", "middle"]


def truncate(ids: list[int], limit: int, side: Literal["left", "right", "middle"]) -> list[int]:
    """At most ``limit`` (>= 1) tokens of ``ids``; too many are cut on ``side``.

    ``middle`` keeps ``limit // 2`` tokens of the beginning and the rest of the end, as verl does.
    """
    if len(ids) <= limit:
        return ids
    if side == "left":
        return ids[-limit:]
    if side == "right":
        return ids[:limit]
    head = limit // 2
    return ids[:head] + ids[len(ids) - (limit - head) :]
