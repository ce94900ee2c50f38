"""Where the folder of a model is, without loading it."""

from __future__ import annotations

import os
from pathlib import Path

from trainer.base.home import expanded
from trainer.base.model_shape import ModelShape
from trainer.config.schema import Config


def critic_shape(config: Config) -> ModelShape | None:
    """The shape of the critic; None without one, and when its model is not on this machine.

    Raises UserError when its folder is no decoder's.
    """
    path = config.critic.model.path
    if not config.uses_critic or path is None:
        return None
    folder = folder_of(path)
    return None if folder is None else ModelShape.from_folder(folder).of_values()


def folder_of(path: str) -> Path | None:
    """The folder of a local model, a built-in one, or a hub model that was downloaded before.

    None when the model is not on this machine.
    """
    if path.startswith("builtin:"):
        try:
            from trainer.models import resolve
        except ImportError:
            return None
        return Path(resolve(path))
    local = expanded(path)
    if local.is_dir():
        return local
    caches = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(os.environ.get("HF_HOME") or caches / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    snapshots = expanded(hub, "set HF_HOME") / f"models--{path.replace('/', '--')}" / "snapshots"
    folders = [config.parent for config in snapshots.glob("*/config.json")]
    return max(folders, key=lambda folder: folder.stat().st_mtime, default=None)
