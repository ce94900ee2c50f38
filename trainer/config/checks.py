"""Checks across keys, each with its fix. Pure: a Config in, messages out."""

from __future__ import annotations

from trainer.config.schema import Config


def cross_checks(config: Config) -> list[str]:
    """Everything that contradicts something else, or is not built."""
    return []
