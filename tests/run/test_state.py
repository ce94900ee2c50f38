"""Every state that training changes is restored from a checkpoint."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from tests.run.ranks import Rank
from trainer.checkpoint.snapshot import state
from trainer.checkpoint.snapshot.state_registry import StateRegistry
from trainer.run.context import RunContext
from trainer.tracking.wandb_run import WandbIdentity, load_identity, save_identity

SAVED_BY_THE_ENGINE = {"engine", "model", "reference", "stop_step"}
"""Components whose weights the checkpoint captures from the engine, or that are the
step itself, or that never change."""
STATE_NAMES = {"lowered_budgets": "budgets"}
"""Field of ``RunContext`` -> its name in checkpoints, where the two differ."""
COUNTERS = (int, float, list[int] | None)


def encoded(value: Any) -> bytes:
    return state.encode({"x": value})


def test_every_changed_state_is_restored(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    rank = Rank(tmp_path / "one")
    other = Rank(tmp_path / "two")
    before = [registry.state_dict() for registry in rank.states()]
    rank.train()
    saved = [registry.state_dict() for registry in rank.states()]
    for old, new in zip(before, saved, strict=True):
        for name in new:
            assert encoded(old[name]) != encoded(new[name]), f"{name}: the test doesn't change it"
    on_disk = [state.encode(states) for states in saved]
    expected_draws = (random.random(), np.random.rand(), float(torch.rand(1)))
    for registry, data in zip(other.states(), on_disk, strict=True):
        assert registry.load_state_dict(state.decode(data)) == []
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == expected_draws
    for registry, data in zip(other.states(), saved, strict=True):
        for name, value in registry.state_dict().items():
            if name not in ("python", "numpy", "torch"):
                assert encoded(value) == encoded(data[name]), f"{name} is not restored"
    assert other.calibrator.fit() == rank.calibrator.fit() is not None
    assert other.kl_controller.coef == rank.kl_controller.coef != 0.1
    assert load_identity(other.run_dir) == load_identity(rank.run_dir)
    with rank.loader, other.loader:
        batch = [example.index for example in next(iter(rank.loader))]
        assert [example.index for example in next(iter(other.loader))] == batch


def test_every_stateful_field_of_the_run_context_is_in_checkpoints(tmp_path: Path) -> None:
    """A new counter, or a component with ``load_state_dict``, has to be registered."""
    states = Rank(tmp_path).states()
    names = [name for registry in states for name in registry.names]
    loads = [load for registry in states for load in registry._loaders.values()]
    rank = Rank(tmp_path)
    owners = {type(getattr(load, "__self__", None)) for load in loads}
    for name, kind in get_type_hints(RunContext).items():
        if name in SAVED_BY_THE_ENGINE or (isinstance(kind, type) and issubclass(kind, nn.Module)):
            continue
        if kind in COUNTERS:
            saved_as = STATE_NAMES.get(name, name)
            assert saved_as in names, f"RunContext.{name} is in no checkpoint"
        elif hasattr(kind, "load_state_dict"):
            assert type(getattr(rank, name)) in owners, f"RunContext.{name} is in no checkpoint"


def test_random_states_are_restored_last(tmp_path: Path) -> None:
    assert Rank(tmp_path).states()[1].names[-3:] == ("python", "numpy", "torch")


def test_a_checkpoint_of_another_run_does_not_change_the_wandb_run(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.identity.same_run = False
    rank.identity.load_state_dict(
        {"identity": {"id": "a", "project": "p", "name": "n", "group": None}, "last_step": 9}
    )
    assert load_identity(tmp_path) is None
    save_identity(tmp_path, WandbIdentity("this", "p", "n", None))
    rank.identity.same_run = True
    rank.identity.load_state_dict(
        {"identity": {"id": "a", "project": "p", "name": "n", "group": None}, "last_step": 9}
    )
    assert rank.identity.id == "this"


def test_lowered_budgets_of_another_world_size_are_not_restored(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.states()[0].load_state_dict({"budgets": [1, 2, 3]})
    assert rank.lowered_budgets is None
    rank.states()[0].load_state_dict({"budgets": [1, 2]})
    assert rank.lowered_budgets == [1, 2]


def test_the_critics_lowered_budgets_are_restored(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    lowered: list[list[int]] = []
    rank.critic = SimpleNamespace(lowered_budgets=[3, 4], lower_budgets=lowered.append)
    saved = rank.states()[0].state_dict()
    assert saved["critic_budgets"] == [3, 4]
    rank.states()[0].load_state_dict(saved)
    assert lowered == [[3, 4]]


def test_a_registry_saves_and_loads_states_by_name() -> None:
    registry = StateRegistry()
    values = {"a": 1}
    registry.add("a", lambda: values["a"], lambda value: values.update(a=value))
    registry.add("b", lambda: None, lambda value: None)
    with pytest.raises(ValueError, match="a state a already"):
        registry.add("a", lambda: 0, lambda value: None)
    assert registry.state_dict() == {"a": 1, "b": None}
    assert registry.load_state_dict({"a": 5, "c": 6}) == ["b"]
    assert values == {"a": 5}
