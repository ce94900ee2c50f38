"""Whatever of a run changes while it trains comes back from a checkpoint; a part that is forgotten
is found here.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from tests.run.ranks import Rank
from trainer.checkpoint.snapshot import state
from trainer.checkpoint.snapshot.parts import Parts
from trainer.run.build import Context
from trainer.tracking.wandb_run import Identity, keep_identity, stored_identity

OF_THE_ENGINE = {"engine", "loaded", "reference"}
"""Their state is the engine's own, which the checkpoint captures, or frozen."""
COUNTERS = (int, float, list[int] | None)


def plain(value: Any) -> bytes:
    return state.encode({"x": value})


def test_everything_that_changes_comes_back(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    rank, other = Rank(tmp_path / "one"), Rank(tmp_path / "two")
    before = [parts.state_dict() for parts in rank.parts()]
    rank.train()
    saved = [parts.state_dict() for parts in rank.parts()]
    for old, new in zip(before, saved, strict=True):
        for name in new:
            assert plain(old[name]) != plain(new[name]), f"{name}: the test doesn't change it"
    on_disk = [state.encode(part) for part in saved]
    drawn = (random.random(), np.random.rand(), float(torch.rand(1)))
    for parts, data in zip(other.parts(), on_disk, strict=True):
        assert parts.load_state_dict(state.decode(data)) == []
    assert (random.random(), np.random.rand(), float(torch.rand(1))) == drawn
    for parts, data in zip(other.parts(), saved, strict=True):
        for name, value in parts.state_dict().items():
            if name not in ("python", "numpy", "torch"):
                assert plain(value) == plain(data[name]), f"{name} did not come back"
    assert other.calibrator.fit() == rank.calibrator.fit() is not None
    assert other.kl.coef == rank.kl.coef != 0.1
    assert stored_identity(other.run_dir) == stored_identity(rank.run_dir)
    with rank.loader, other.loader:
        assert [e.index for e in next(iter(other.loader))] == [
            e.index for e in next(iter(rank.loader))
        ]


def test_no_state_of_a_context_is_forgotten(tmp_path: Path) -> None:
    """A new field that counts, or that has a ``load_state_dict``, must be registered."""
    shared, own = Rank(tmp_path).parts()
    loads = [load for parts in (shared, own) for _, load in parts._parts.values()]
    rank = Rank(tmp_path)
    owners = {type(getattr(load, "__self__", None)) for load in loads}
    for name, kind in get_type_hints(Context).items():
        if name in OF_THE_ENGINE or (isinstance(kind, type) and issubclass(kind, nn.Module)):
            continue
        if kind in COUNTERS:
            assert name in shared.names + own.names, f"Context.{name} is in no checkpoint"
        elif hasattr(kind, "load_state_dict"):
            assert type(getattr(rank, name)) in owners, f"Context.{name} is in no checkpoint"


def test_random_states_are_restored_last(tmp_path: Path) -> None:
    assert Rank(tmp_path).parts()[1].names[-3:] == ("python", "numpy", "torch")


def test_a_checkpoint_of_another_run_makes_no_other_run_of_this_one(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.identity.own = False
    rank.identity.load_state_dict(
        {"identity": {"id": "a", "project": "p", "name": "n", "group": None}, "last_step": 9}
    )
    assert stored_identity(tmp_path) is None
    keep_identity(tmp_path, Identity("mine", "p", "n", None))
    rank.identity.own = True
    rank.identity.load_state_dict(
        {"identity": {"id": "a", "project": "p", "name": "n", "group": None}, "last_step": 9}
    )
    assert rank.identity.id == "mine"


def test_budgets_of_another_world_are_left_to_it(tmp_path: Path) -> None:
    rank = Rank(tmp_path)
    rank.parts()[0].load_state_dict({"budgets": [1, 2, 3]})
    assert rank.budgets is None
    rank.parts()[0].load_state_dict({"budgets": [1, 2]})
    assert rank.budgets == [1, 2]


def test_parts_by_name() -> None:
    parts, held = Parts(), {"a": 1}
    parts.add("a", lambda: held["a"], lambda value: held.update(a=value))
    parts.add("b", lambda: None, lambda value: None)
    with pytest.raises(ValueError, match="a part a already"):
        parts.add("a", lambda: 0, lambda value: None)
    assert parts.state_dict() == {"a": 1, "b": None}
    assert parts.load_state_dict({"a": 5, "c": 6}) == ["b"]
    assert held == {"a": 5}
