"""A model folder without weights, from which vLLM builds the model that the trainer then fills."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.errors import UserError
from trainer.rollout.settings import KEY

if TYPE_CHECKING:
    from trainer.models import LoadedModel


def write_model_folder(loaded: LoadedModel, folder: Path) -> Path:
    """Write config and tokenizer of ``loaded`` to the private ``folder``, and return it.

    What an earlier attempt left in ``folder`` is deleted.
    """
    if folder.exists():
        shutil.rmtree(folder)
    make_private(folder)
    config = loaded.model.config.to_dict()  # type: ignore[operator, union-attr]
    config["architectures"] = [type(loaded.model).__name__]
    (folder / "config.json").write_text(json.dumps(config, default=str))
    loaded.tokenizer.save_pretrained(folder)
    return folder


def make_private(folder: Path) -> None:
    """Make ``folder`` and its missing parents, readable by their owner only."""
    for missing in reversed([p for p in (folder, *folder.parents) if not p.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def check_architecture(loaded: LoadedModel) -> None:
    """Raise :class:`UserError` for an architecture that vLLM does not support. Imports vLLM."""
    from vllm import ModelRegistry

    name = type(loaded.model).__name__
    if name not in ModelRegistry.get_supported_archs():
        raise UserError(
            f"{KEY}.name: vLLM has no {name}, the architecture of {loaded.source}; set "
            f"{KEY}.name=hf, which generates with the trainer's own model"
        )
