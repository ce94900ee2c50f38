"""Generation by vLLM: in the trainer's process, or in servers of its own.

Nothing here imports vLLM before an engine starts.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from trainer.config.schema import Rollout
from trainer.models import LoadedModel
from trainer.parallel.world import World
from trainer.rollout.vllm.inprocess import VllmEngine
from trainer.rollout.vllm.options import options

__all__ = ["VllmEngine", "make_vllm_engine"]


def make_vllm_engine(
    rollout: Rollout, loaded: LoadedModel, world: World, run_dir: Path, *, eos_ids: Sequence[int]
) -> VllmEngine:
    """The engine ``vllm`` of this rank; its log and model folder lie in ``run_dir/vllm``.

    Raises :class:`UserError` for settings that don't fit together, or when vLLM is not installed.
    """
    wanted = options(rollout, loaded.shape, next(loaded.model.parameters()).dtype, world)
    return VllmEngine(loaded, wanted, eos_ids=eos_ids, folder=run_dir / "vllm" / f"rank_{world.rank}")
