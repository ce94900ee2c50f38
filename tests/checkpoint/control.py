"""Programs of the tests that look at what a checkpointer keeps, and at what it says of itself."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.gate import GATE
from tests.checkpoint.programs import checkpointer
from tests.checkpoint.tiny import full_state, join, make_engine, train_step
from trainer.base.errors import UserError
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import commit, manifest


def keep_best(rank: int, size: int, run: str, store: str) -> None:
    """Two attempts: by one metric, then by another, against which the first one's values mean
    nothing.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    root = Path(run) / commit.FOLDER
    chosen: dict[str, Any] = {
        "keep_last": 1,
        "keep_best": 2,
        "best_metric": "val/reward",
        "best": "max",
    }
    keeper = checkpointer(world, engine, Path(run), **chosen)
    for step, value in enumerate([0.1, 0.9, 0.5, None, 0.7, 0.2], 1):
        assert keeper.save(step, {}, {}, value, blocking=True)
    assert commit.steps_on_disk(root) == [6, 5, 2]
    assert [manifest.read(commit.step_dir(root, s)).metric for s in (6, 5, 2)] == [0.2, 0.7, 0.9]
    keeper.close()
    keeper = checkpointer(
        world, engine, Path(run), 2, **(chosen | {"best_metric": "train/nll", "best": "min"})
    )
    restored = keeper.restore()
    assert restored is not None and restored.step == keeper.last_committed_step == 6
    for step, value in enumerate([3.0, 1.0, 2.0, float("nan")], 7):
        assert keeper.save(step, {}, {}, value, blocking=True)
    assert commit.steps_on_disk(root) == [10, 9, 8]
    keeper.close()


def numbers(rank: int, size: int, run: str, store: str) -> None:
    """Every metric, from before the first save to a failure."""
    gate, said = Path(os.environ[GATE]), list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer.checkpoint").addHandler(handler)
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    keeper = checkpointer(world, engine, Path(run), disk="tests.checkpoint.gate:GateDisk")
    now = keeper.metrics()
    assert {k: v for k, v in now.items() if k != "ckpt/age_s"} == {
        "ckpt/failures": 0,
        "ckpt/stall_s": 0,
        "ckpt/last_committed_step": -1,
        "ckpt/in_flight": 0,
    }
    assert keeper.last_committed_step is None and keeper.save_s is None and now["ckpt/age_s"] >= 0
    train_step(engine, 1)
    began = time.perf_counter()
    assert keeper.save(1, {}, {})
    keeper.before_step()
    stalled = time.perf_counter() - began
    train_step(engine, 2)
    assert keeper.save(2, {}, {})
    assert not keeper.save(3, {}, {}), "both buffers are in use"
    now = keeper.metrics()
    assert (
        now["ckpt/in_flight"] == 2
        and now["ckpt/skipped"] == 1
        and now["ckpt/last_committed_step"] == -1
    )
    assert now["ckpt/stall_s"] > 0 and stalled > 0
    assert keeper.metrics()["ckpt/stall_s"] == 0, "since the last call"
    gate.write_text("open")
    assert keeper.wait(150)
    now = keeper.metrics()
    made = manifest.read(Path(run) / commit.FOLDER / "step_2")
    assert (
        now["ckpt/in_flight"] == 0
        and now["ckpt/last_committed_step"] == 2 == keeper.last_committed_step
    )
    assert made.nbytes <= now["ckpt/bytes"] < made.nbytes + 4096 * len(made.files)
    assert (
        now["ckpt/write_s"] > 0 and now["ckpt/copy_s"] > 0 and now["ckpt/write_s"] == keeper.save_s
    )
    assert abs(now["ckpt/write_gbps"] * now["ckpt/write_s"] * 1e9 / now["ckpt/bytes"] - 1) < 1e-6
    assert (
        0 <= now["ckpt/age_s"] <= time.perf_counter() - began
        and now["ckpt/failures"] == 0
        and said == []
    )
    latest, until = Path(run) / commit.FOLDER / commit.LATEST, time.monotonic() + 150
    while not (latest.exists() and latest.read_text() == "step_2\n"):  # written after the commit
        assert time.monotonic() < until
        time.sleep(0.002)
    gate.write_text("fail")
    assert not keeper.save(3, {}, {}, blocking=True)
    # The step after the failure: in the log at once, and among its metrics.
    assert (
        len(said) == 1 and "checkpoint of step 3 failed" in said[0] and "No space left" in said[0]
    ), said
    now = keeper.metrics()
    assert now["ckpt/failures"] == 1 and now["ckpt/last_committed_step"] == 2
    gate.write_text("open")
    keeper.close()


def read_only(rank: int, size: int, run: str, store: str) -> None:
    """The run folder's disk takes nothing: one message, the same on every rank."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    disk = "tests.checkpoint.shims:FaultyDisk"
    with pytest.raises(
        UserError,
        match=r"can't hold checkpoints \(Read-only file system\); set trainer.default_local",
    ):
        checkpointer(world, engine, Path(run), disk=disk)
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: Path(path) != Path(run) / "checkpoints")
        with pytest.raises(
            UserError,
            match=r"can't hold checkpoints \(Permission denied\); set trainer.default_local",
        ):
            checkpointer(world, engine, Path(run))


def beside(rank: int, size: int, run: str, store: str) -> None:
    """Tensors that are not the engine's come back on every rank, also those that share memory with
    none of its own.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    held = {
        "reference.a": torch.arange(100_000.0),
        "reference.b": torch.full((3, 5), 2.0, dtype=torch.bfloat16),
    }
    settings: dict[str, Any] = {
        "rank": rank,
        "world_size": size,
        "config_hash": "tests",
        "local_world_size": size,
        "group": world.cpu_group,
    }
    keeper = Checkpointer(
        Path(run), engine.ds, CheckpointSettings(), attempt=1, beside=held, **settings
    )
    train_step(engine, 1)
    assert keeper.save(1, {}, {}, blocking=True)
    state = full_state(engine)
    keeper.close()
    empty = {name: torch.zeros_like(t) for name, t in held.items()} | {"reference.c": torch.ones(2)}
    other = make_engine(world, seed=1)
    again = Checkpointer(
        Path(run), other.ds, CheckpointSettings(), attempt=2, beside=empty, **settings
    )
    restored = again.restore()
    assert restored is not None and restored.step == 1
    assert all(torch.equal(empty[name], t) for name, t in held.items()) and empty[
        "reference.c"
    ].tolist() == [1, 1]
    assert all(torch.equal(t, state[name]) for name, t in full_state(other).items())
    again.close()
