"""Programs for ranks that test which checkpoints a checkpointer keeps, and its metrics."""

from __future__ import annotations

import logging
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.checkpoint.gate_disk import GATE
from tests.checkpoint.rank_programs import make_checkpointer
from tests.checkpoint.tiny_training import full_state, join, make_engine, train_step
from trainer.base.errors import UserError
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot.fragments import fragments
from trainer.checkpoint.snapshot.planner import SnapshotPlanner
from trainer.checkpoint.store import layout, manifest


def keep_best(rank: int, size: int, run: str, store: str) -> None:
    """Two attempts with different metrics: values of the first mean nothing to the second."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    root = Path(run) / layout.FOLDER
    settings: dict[str, Any] = {
        "keep_last": 1,
        "keep_best": 2,
        "best_metric": "val/reward",
        "best_mode": "max",
    }
    checkpointer = make_checkpointer(world, engine, Path(run), **settings)
    for step, value in enumerate([0.1, 0.9, 0.5, None, 0.7, 0.2], 1):
        assert checkpointer.save(step, {}, {}, value, blocking=True)
    assert layout.steps_on_disk(root) == [6, 5, 2]
    assert [manifest.read(layout.step_dir(root, s)).metric for s in (6, 5, 2)] == [0.2, 0.7, 0.9]
    checkpointer.close()
    settings |= {"best_metric": "train/nll", "best_mode": "min"}
    checkpointer = make_checkpointer(world, engine, Path(run), 2, **settings)
    restored = checkpointer.restore()
    assert restored is not None and restored.step == checkpointer.last_committed_step == 6
    for step, value in enumerate([3.0, 1.0, 2.0, float("nan")], 7):
        assert checkpointer.save(step, {}, {}, value, blocking=True)
    assert layout.steps_on_disk(root) == [10, 9, 8]
    checkpointer.close()


def metrics(rank: int, size: int, run: str, store: str) -> None:
    """Every metric, from before the first save to a failed one."""
    gate = Path(os.environ[GATE])
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("trainer.checkpoint").addHandler(handler)
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    checkpointer = make_checkpointer(
        world, engine, Path(run), disk="tests.checkpoint.gate_disk:GateDisk"
    )
    _check_before_first_save(checkpointer)
    train_step(engine, 1)
    began = time.perf_counter()
    assert checkpointer.save(1, {}, {})
    checkpointer.before_step()
    stalled = time.perf_counter() - began
    train_step(engine, 2)
    assert checkpointer.save(2, {}, {})
    assert not checkpointer.save(3, {}, {}), "both buffers are in use"
    now = checkpointer.metrics()
    assert now["ckpt/in_flight"] == 2 and now["ckpt/skipped"] == 1
    assert now["ckpt/last_committed_step"] == -1
    assert now["ckpt/stall_s"] > 0 and stalled > 0
    assert checkpointer.metrics()["ckpt/stall_s"] == 0, "since the last call"
    gate.write_text("open")
    assert checkpointer.wait(150)
    _check_after_commit_of_step_2(checkpointer, Path(run), began)
    assert logged == []
    latest = Path(run) / layout.FOLDER / layout.LATEST
    deadline = time.monotonic() + 150
    while not (latest.exists() and latest.read_text() == "step_2\n"):  # written after the commit
        assert time.monotonic() < deadline
        time.sleep(0.002)
    gate.write_text("fail")
    assert not checkpointer.save(3, {}, {}, blocking=True)
    # The failure is in the log at once, and among the metrics of the next step.
    assert len(logged) == 1, logged
    assert "checkpoint of step 3 failed" in logged[0] and "No space left" in logged[0], logged
    now = checkpointer.metrics()
    assert now["ckpt/failures"] == 1 and now["ckpt/last_committed_step"] == 2
    assert now["ckpt/failed_in_a_row"] == 1
    gate.write_text("open")
    checkpointer.close()


def room(rank: int, size: int, run: str, store: str) -> None:
    """A disk with room for exactly ``keep_last`` checkpoints, seen by statvfs, or a quota that is
    not seen: what retention would remove next goes before the save, and two verified ones stay.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    limits = Path(os.environ["PLIMSOLL_ROOM"])

    def set_room(checkpoints: float, shown: int) -> None:
        world.barrier()
        if rank == 0:
            limits.write_text(f"{int(nbytes * checkpoints)} {shown}")
        world.barrier()

    for shown in (0, 1 << 40):
        for keep_last, best, checkpoints in ((3, 0, 3.5), (2, 1, 3.5), (2, 0, 2.5)):
            nbytes = 1 << 30
            set_room(1, shown)
            folder = Path(run) / f"{shown}-{keep_last}-{best}"
            folder.mkdir(exist_ok=True)
            options: dict[str, Any] = {"keep_last": keep_last, "keep_best": best}
            checkpointer = make_checkpointer(
                world, engine, folder, disk="tests.checkpoint.disks:SmallDisk", **options
            )
            root = folder / layout.FOLDER
            assert checkpointer.save(1, {}, {}, 9.0, blocking=True)
            world.barrier()
            nbytes = sum(path.stat().st_size for path in root.rglob("*") if path.is_file())
            set_room(checkpoints, shown)
            saved = [
                step for step in range(2, 8) if checkpointer.save(step, {}, {}, 0.0, blocking=True)
            ]
            world.barrier()
            failed_in_a_row = checkpointer.metrics()["ckpt/failed_in_a_row"]
            if checkpoints > 3:
                # A quota shows itself once.
                assert saved == ([2, 3, 5, 6, 7] if shown else [2, 3, 4, 5, 6, 7]), saved
                assert failed_in_a_row == 0
                kept = [7, 6, 1] if best else [7, 6, 5]
            else:
                assert saved == [2] and failed_in_a_row == 5
                assert "No space left on device" in checkpointer.last_failure
                kept = [2, 1]
            assert layout.steps_on_disk(root) == kept
            assert all(not manifest.problems(p, manifest.read(p)) for p in root.glob("step_?"))
            set_room(9, shown)
            assert checkpointer.save(9, {}, {}, 0.0, blocking=True)
            assert checkpointer.metrics()["ckpt/failed_in_a_row"] == 0
            checkpointer.close()
            shutil.rmtree(folder, ignore_errors=True)
            world.barrier()


def failed_copy(rank: int, size: int, run: str, store: str) -> None:
    """A copy to host memory that fails is one failure with its cause; the next save commits."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    checkpointer = make_checkpointer(world, engine, Path(run))

    def fail(*_: object) -> None:
        raise MemoryError("no memory left")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(SnapshotPlanner, "plan", fail)
        assert not checkpointer.save(1, {}, {}, blocking=True)
    assert checkpointer.metrics()["ckpt/failures"] == 1
    assert "the copy to host memory failed: no memory left" in checkpointer.last_failure
    assert checkpointer.save(2, {}, {}, blocking=True)
    assert checkpointer.last_committed_step == 2
    checkpointer.close()


def _check_before_first_save(checkpointer: Checkpointer) -> None:
    now = checkpointer.metrics()
    assert {k: v for k, v in now.items() if k != "ckpt/age_s"} == {
        "ckpt/failures": 0,
        "ckpt/failed_in_a_row": 0,
        "ckpt/stall_s": 0,
        "ckpt/last_committed_step": -1,
        "ckpt/in_flight": 0,
    }
    assert checkpointer.last_committed_step is None and checkpointer.save_s is None
    assert now["ckpt/age_s"] >= 0


def _check_after_commit_of_step_2(checkpointer: Checkpointer, run: Path, began: float) -> None:
    now = checkpointer.metrics()
    made = manifest.read(run / layout.FOLDER / "step_2")
    assert now["ckpt/in_flight"] == 0
    assert now["ckpt/last_committed_step"] == 2 == checkpointer.last_committed_step
    assert made.nbytes <= now["ckpt/bytes"] < made.nbytes + 4096 * len(made.files)
    assert now["ckpt/write_s"] > 0 and now["ckpt/copy_s"] > 0
    assert now["ckpt/write_s"] == checkpointer.save_s
    assert abs(now["ckpt/write_gbps"] * now["ckpt/write_s"] * 1e9 / now["ckpt/bytes"] - 1) < 1e-6
    assert 0 <= now["ckpt/age_s"] <= time.perf_counter() - began
    assert now["ckpt/failures"] == 0


def read_only(rank: int, size: int, run: str, store: str) -> None:
    """The disk of the run folder is read-only: one message, the same on every rank."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    message = r"can't hold checkpoints \({}\); set trainer.default_local"
    with pytest.raises(UserError, match=message.format("Read-only file system")):
        make_checkpointer(world, engine, Path(run), disk="tests.checkpoint.disks:FaultyDisk")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "access", lambda path, mode: Path(path) != Path(run) / "checkpoints")
        with pytest.raises(UserError, match=message.format("Permission denied")):
            make_checkpointer(world, engine, Path(run))


def extra_tensors(rank: int, size: int, run: str, store: str) -> None:
    """Tensors that are not the engine's come back on every rank; those not saved stay."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    saved = {
        "reference.a": torch.arange(100_000.0),
        "reference.b": torch.full((3, 5), 2.0, dtype=torch.bfloat16),
    }
    checkpointer = _with_extra_tensors(Path(run), engine, world, 1, saved)
    train_step(engine, 1)
    assert checkpointer.save(1, {}, {}, blocking=True)
    state = full_state(engine)
    checkpointer.close()
    live = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    live["reference.c"] = torch.ones(2)
    other = make_engine(world, seed=1)
    checkpointer = _with_extra_tensors(Path(run), other, world, 2, live)
    restored = checkpointer.restore()
    assert restored is not None and restored.step == 1
    assert all(torch.equal(live[name], tensor) for name, tensor in saved.items())
    assert live["reference.c"].tolist() == [1, 1]
    assert all(torch.equal(tensor, state[name]) for name, tensor in full_state(other).items())
    checkpointer.close()


def _with_extra_tensors(
    run: Path, engine: Any, world: Any, attempt: int, tensors: dict[str, torch.Tensor]
) -> Checkpointer:
    return Checkpointer(
        run,
        engine.ds,
        CheckpointSettings(),
        world,
        attempt=attempt,
        config_hash="tests",
        extra_tensors=tensors,
    )


def further_engines(rank: int, size: int, run: str, store: str) -> None:
    """Two engines in one process, saved and restored together, whatever their ZeRO stages; a NaN of
    either is found, and a checkpoint that lacks one or holds another model of it is refused.
    """
    world = join(rank, size, Path(store))
    for attempt, stages in enumerate([(0, 0), (1, 1), (2, 3), (3, 3), (1, 2)], 1):
        policy = make_engine(world, stage=stages[0], seed=1)
        critic = make_engine(world, stage=stages[1], seed=2, width=9)
        folder = Path(run) / str(attempt)
        checkpointer = _with_critic(folder, policy, critic, world, attempt=1)
        for step in (1, 2):
            train_step(critic, step + 10)
            train_step(policy, step)
        assert checkpointer.save(2, {}, {}, blocking=True)
        expected = full_state(policy), full_state(critic)
        checkpointer.close()
        policy = make_engine(world, stage=stages[1], seed=3)
        critic = make_engine(world, stage=stages[0], seed=4, width=9)
        checkpointer = _with_critic(folder, policy, critic, world, attempt=2)
        restored = checkpointer.restore()
        assert restored is not None and restored.step == 2
        for engine, saved in zip((policy, critic), expected, strict=True):
            loaded = full_state(engine)
            same = loaded.keys() & saved.keys()  # stage 0 has no master copies
            assert any(name.endswith("exp_avg_sq") for name in same)
            assert all(torch.equal(loaded[name], saved[name]) for name in same)
        fragments(critic.ds)[0].tensor.fill_(float("nan"))
        with pytest.raises(UserError, match=r"Step 3 is not saved: .* holds NaN"):
            checkpointer.save(3, {}, {})
        checkpointer.close()
    smaller = make_engine(world, width=5)
    checkpointer = _with_critic(folder, make_engine(world), smaller, world, attempt=3)
    with pytest.raises(UserError, match=r"holds another model: .* set critic.model.path"):
        checkpointer.restore()
    checkpointer.close()
    alone = make_checkpointer(world, policy, Path(run) / "alone")
    assert alone.save(1, {}, {}, blocking=True)
    alone.close()
    checkpointer = _with_critic(Path(run) / "alone", policy, smaller, world, attempt=2)
    with pytest.raises(UserError, match=r"holds no critic: .* Set algorithm.adv_estimator"):
        checkpointer.restore()
    checkpointer.close()


def _with_critic(run: Path, policy: Any, critic: Any, world: Any, *, attempt: int) -> Checkpointer:
    return Checkpointer(
        run,
        policy.ds,
        CheckpointSettings(),
        world,
        attempt=attempt,
        config_hash="tests",
        further_engines={"critic": critic.ds},
    )


def restore_best(rank: int, size: int, run: str, store: str) -> None:
    """The best whole checkpoint comes back while the run trains; a damaged one is passed over."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    root = Path(run) / layout.FOLDER
    checkpointer = make_checkpointer(
        world, engine, Path(run), keep_last=1, keep_best=2, best_metric="val/reward"
    )
    assert checkpointer.restore_best() is None
    states = {}
    for step, value in enumerate([0.5, 0.9, 0.7, None, float("nan")], 1):
        train_step(engine, step)
        assert checkpointer.save(step, {}, {"at": step}, value, blocking=True)
        states[step] = full_state(engine)
    for best in (2, 3):
        train_step(engine, 9)
        restored = checkpointer.restore_best()
        assert restored is not None and restored.step == best
        assert restored.global_state == {"at": best}
        loaded = full_state(engine)
        assert all(torch.equal(loaded[name], value) for name, value in states[best].items())
        world.barrier()
        if rank == 0 and best == 2:
            file = next(layout.step_dir(root, best).rglob("*.pt"))
            file.write_bytes(b"damaged")
        world.barrier()
    assert (root / "step_5").is_dir(), "newer checkpoints stay"
    checkpointer.close()


def not_finite(rank: int, size: int, run: str, store: str) -> None:
    """A NaN from step 3 on ends the run; the checkpoint of step 2 is the newest and whole."""
    world = join(rank, size, Path(store))
    engine = make_engine(world)
    checkpointer = make_checkpointer(world, engine, Path(run))
    for step in (1, 2):
        train_step(engine, step)
        assert checkpointer.save(step, {}, {})
    checkpointer.before_step()
    expected = full_state(engine)
    if rank == size - 1:  # a part that no other rank has
        moments = [f for f in fragments(engine.ds) if f.kind == "exp_avg_sq"]
        moments[-1].tensor[-1] = float("inf")
    with pytest.raises(
        UserError, match=r"Step 3 is not saved: .*exp_avg_sq.* holds NaN or infinity. Step 2, saved"
    ):
        checkpointer.save(3, {}, {})
    restored = checkpointer.restore()
    assert restored is not None and restored.step == 2
    loaded = full_state(engine)
    assert all(torch.equal(loaded[name], value) for name, value in expected.items())
    checkpointer.close()
