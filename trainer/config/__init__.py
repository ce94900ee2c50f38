"""Settings: the typed schema, the one validation pass, the batch algebra. Imports no torch."""

from __future__ import annotations

from trainer.config.load import load
from trainer.config.schema import Config

__all__ = ["Config", "load"]
