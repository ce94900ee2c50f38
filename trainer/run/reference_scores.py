"""The rewards of the model that a run began with, on each validation prompt:
``<run>/val_reference.json``. The win rate compares with them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from trainer.base import atomic
from trainer.base.json_files import is_count, is_number, read_object
from trainer.run.source_metrics import PromptResult

FILE = "val_reference.json"


def save_reference(run_dir: Path, results: Sequence[PromptResult]) -> None:
    """Write the mean reward of each prompt, whole. Raises OSError on a full disk."""
    prompts = {str(result.index): [result.digest, result.mean] for result in results}
    atomic.write_json(run_dir / FILE, {"prompts": prompts})


def load_reference(run_dir: Path) -> dict[int, tuple[int, float]]:
    """Index -> (digest of the prompt, mean reward); empty when there is none."""
    prompts = read_object(run_dir / FILE, {"prompts": _are_prompts}).get("prompts", {})
    return {int(index): (digest, mean) for index, (digest, mean) in prompts.items()}


def _are_prompts(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        str(index).isdecimal()
        and isinstance(pair, list)
        and len(pair) == 2
        and is_count(pair[0])
        and is_number(pair[1])
        for index, pair in value.items()
    )
