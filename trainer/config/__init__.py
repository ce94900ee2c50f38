"""Settings: the typed schema, the one validation pass, the batch algebra. Imports no torch.

Names are imported when first used: ``--help`` and ``--cfg job`` answer without the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.frozen import freeze, load_frozen, run_dir_of
    from trainer.config.loading import load
    from trainer.config.schema import Config

_HOMES = {
    "Config": "schema",
    "freeze": "frozen",
    "load": "loading",
    "load_frozen": "frozen",
    "run_dir_of": "frozen",
}

__all__ = ["Config", "freeze", "load", "load_frozen", "run_dir_of"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
