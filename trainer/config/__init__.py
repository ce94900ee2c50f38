"""Settings of a run: verl's key tree, typed, validated in one pass. Imports no torch.

Read ``entry`` (command line to Hydra), ``overrides`` (the command line is checked), ``loading``
(settings become a ``Config``), ``frozen`` (the run folder's config.yaml). ``schema`` has the typed
sections, ``keys`` the key names and defaults, ``checks`` the checks across keys, ``verl`` what
becomes of verl's other settings; ``cli`` has the help text and ``reference`` writes docs/config.md.
Names are imported when first used: ``--help`` and ``--cfg job`` answer without the schema.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trainer.config.frozen import freeze, load_frozen, run_dir_of
    from trainer.config.loading import load
    from trainer.config.schema import Config

_MODULES = {
    "Config": "schema",
    "freeze": "frozen",
    "load": "loading",
    "load_frozen": "frozen",
    "run_dir_of": "frozen",
}

__all__ = ["Config", "freeze", "load", "load_frozen", "run_dir_of"]


def __getattr__(name: str) -> Any:
    from importlib import import_module

    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
