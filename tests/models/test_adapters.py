"""A checkpoint of adapters is worth something only on the weights, and with the settings, that it
was trained with.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.config.helpers import load, minimal_settings
from trainer.base.errors import UserError
from trainer.checkpoint.restore import require_same_model
from trainer.models.adapters import adapters_of, require_same_base
from trainer.models.lora import Lora

M = "actor_rollout_ref.model"
FULL = {"model.q_proj.weight": (8, 8)}


def shapes(rank: int, layer: str = "q_proj") -> dict[str, tuple[int, ...]]:
    return {
        f"model.{layer}.base_layer.weight": (8, 8),
        f"model.{layer}.lora_A.default.weight": (rank, 8),
        f"model.{layer}.lora_B.default.weight": (8, rank),
    }


def test_settings_become_adapters() -> None:
    assert adapters_of(load(minimal_settings())) is None
    config = load(
        minimal_settings(
            **{f"{M}.lora_rank": 8, f"{M}.target_modules": ["q_proj", "v_proj"], "trainer.seed": 5}
        )
    )
    assert adapters_of(config) == Lora(rank=8, alpha=16.0, targets=["q_proj", "v_proj"], seed=5)


@pytest.mark.parametrize(
    ("saved", "live", "message"),
    [
        (shapes(8), shapes(4), f"was trained with {M}.lora_rank=8, this run has 4: set it to 8"),
        (shapes(8), FULL, f"was trained with {M}.lora_rank=8, this run has 0: set it to 8"),
        (FULL, shapes(8), f"was trained with {M}.lora_rank=0, this run has 8: set it to 0"),
        (shapes(8), shapes(8, "k_proj"), f"set {M}.target_modules to what the run began with"),
        (FULL, {"model.q_proj.weight": (8, 9)}, f"set {M}.path to what the run began with"),
    ],
)
def test_another_rank_or_other_layers(saved: Any, live: Any, message: str) -> None:
    with pytest.raises(UserError, match=message.replace(".", r"\.")):
        require_same_model(live, SimpleNamespace(shapes=saved, folder=Path("step_3")))  # type: ignore[arg-type]


def test_another_alpha_or_another_base() -> None:
    current = {"alpha": 16.0, "base": "a1", "path": "here"}
    require_same_base(current, {**current, "path": "moved"})
    with pytest.raises(UserError, match=r"lora_alpha=32, this run has 16: set it to 32"):
        require_same_base(current, {**current, "alpha": 32.0})
    with pytest.raises(
        UserError, match=r"other weights than those of here: set .*model\.path .*called there"
    ):
        require_same_base(current, {**current, "base": "b2", "path": "there"})
