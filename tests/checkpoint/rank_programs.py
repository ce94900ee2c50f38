"""Programs that the ranks of the checkpoint tests run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_128, xxh3_128_hexdigest

from tests.checkpoint.gate_disk import GATE
from tests.checkpoint.tiny_training import full_state, join, make_engine, train_step
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import layout
from trainer.checkpoint.store import manifest as manifests

LIMIT_S = 200.0
"""Longest wait in a save, more than a busy machine takes."""


def digest(state: dict[str, torch.Tensor]) -> str:
    whole = xxh3_128()
    for name in sorted(state):
        whole.update(name.encode())
        whole.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def make_checkpointer(
    world: Any, engine: Any, run: Path, attempt: int = 1, **settings: Any
) -> Checkpointer:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    return Checkpointer(
        run,
        engine.ds,
        CheckpointSettings(timeout_s=LIMIT_S, **settings),
        world,
        attempt=attempt,
        config_hash="tests",
    )


def endless(rank: int, size: int, run: str, store: str, attempt: int) -> None:
    """Train and save each step until killed.

    Prints what was restored and what was committed. A restored state must have the digest that the
    state had when it was saved.
    """
    began = time.perf_counter()
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1, seed=attempt)
    checkpointer = make_checkpointer(world, engine, Path(run), attempt, keep_last=3)
    restored = checkpointer.restore()
    first = 1
    if restored is not None:
        state = digest(full_state(engine))
        assert state == restored.global_state["digest"], "a half checkpoint was loaded"
        assert restored.rank_state == {"rank": rank, "step": restored.step}
        first = restored.step + 1
    if rank == 0:
        os.write(1, f"restored {first - 1} {time.perf_counter() - began:.2f}\n".encode())
    reported = first - 1
    for step in itertools.count(first):
        checkpointer.before_step()
        train_step(engine, step)
        state = digest(full_state(engine))
        checkpointer.save(step, {"rank": rank, "step": step}, {"digest": state}, float(step))
        committed = int(checkpointer.metrics()["ckpt/last_committed_step"])
        if rank == 0 and committed > reported:
            os.write(1, f"committed {committed}\n".encode())
            reported = committed


def elastic(rank: int, size: int, run: str, store: str, legs: list[dict[str, Any]]) -> None:
    """Restore into another engine, compare with the state that was saved, train on, and save.

    One leg is one such engine.
    """
    world = join(rank, size, Path(store))
    for leg in legs:
        folder = Path(run) / leg["run"]
        if rank == 0:
            folder.mkdir(exist_ok=True)
        dist.barrier()
        engine = make_engine(world, stage=leg["stage"], bf16=leg["bf16"], seed=leg["attempt"])
        checkpointer = make_checkpointer(world, engine, folder, leg["attempt"])
        restored = checkpointer.restore()
        step = restored.step if restored else 0
        assert step == leg["expect"], f"{leg}: restored {step}"
        if restored is not None:
            ranks = [state["rank"] for state in restored.rank_states]
            assert ranks == list(range(restored.manifest.world_size))
            saved = torch.load(folder / f"state_{step}.pt")
            _require_same_state(full_state(engine), saved, str(leg))
        for now in (step + 1, step + 2):
            checkpointer.before_step()
            train_step(engine, now)
        step += 2
        assert checkpointer.save(step, {"rank": rank}, {"step": step}, blocking=True)
        state = full_state(engine)
        if rank == 0:
            torch.save(state, folder / f"state_{step}.pt")
        checkpointer.close()
        dist.barrier()


def _require_same_state(
    live: dict[str, torch.Tensor], saved: dict[str, torch.Tensor], leg: str
) -> None:
    for name, tensor in saved.items():
        found = live.get(name)
        if found is None and name.endswith("/fp32"):
            # Stage 0 in float32 steps the weights themselves.
            found = live[name.replace("/fp32", "/weight")]
        assert found is not None, f"{leg}: {name}"
        assert torch.equal(found, tensor.to(found.dtype)), f"{leg}: {name}"


def faults(rank: int, size: int, run: str, store: str, faults: list[str]) -> None:
    """Training goes on through each fault of the disk or the writer.

    The checkpoint before stays whole; when the fault is over the next save succeeds.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    fault_file = Path(os.environ["PLIMSOLL_FAULT"])
    root = Path(run) / layout.FOLDER
    checkpointer = make_checkpointer(
        world, engine, Path(run), disk="tests.checkpoint.disks:FaultyDisk"
    )
    patient = checkpointer._settings
    assert checkpointer.restore() is None
    assert checkpointer.save(1, {}, {}, blocking=True)
    step = 1
    for number, fault in enumerate(faults, 1):
        _only_main(rank, partial(fault_file.write_text, fault))
        if fault == "hang":  # only then: on a busy machine a sound disk may take as long
            checkpointer._committer._settings = replace(patient, timeout_s=2.0)
        assert checkpointer.save(step + 1, {}, {})
        checkpointer.before_step()
        train_step(engine, step)
        assert checkpointer.wait(150)
        checkpointer._committer._settings = patient
        metrics = checkpointer.metrics()
        assert metrics["ckpt/failures"] == number, (fault, metrics)
        assert metrics["ckpt/last_committed_step"] == step, (fault, metrics)
        dist.barrier()
        newest = layout.newest_whole(root)
        assert newest is not None and newest[1].step >= step, fault
        assert layout.read_latest(root) == f"step_{step}", fault
        _only_main(rank, fault_file.unlink)
        assert checkpointer.save(step + 2, {}, {}, blocking=True), (fault, checkpointer.metrics())
        step += 2
        dist.barrier()
        # A failed save leaves nothing or, if it failed after the rename, a whole checkpoint.
        expected = {"latest", *(f"step_{s}" for s in (step, step - 1, step - 2))}
        others = {path.name for path in root.iterdir()} - expected
        assert not others, (fault, others)
    checkpointer.close()


def slow(rank: int, size: int, run: str, store: str) -> None:
    """A disk that takes longer than 20 steps: saves are postponed and counted, training goes on."""
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    checkpointer = make_checkpointer(
        world, engine, Path(run), disk="tests.checkpoint.gate_disk:GateDisk"
    )
    begun = []
    for step in range(1, 21):
        train_step(engine, step)
        if checkpointer.save(step, {}, {}):
            begun.append(step)
        checkpointer.before_step()
        assert checkpointer.metrics()["ckpt/in_flight"] == min(step, 2)
    metrics = checkpointer.metrics()
    assert begun == [1, 2]
    assert metrics["ckpt/skipped"] == 18 and metrics["ckpt/last_committed_step"] == -1, metrics
    _only_main(rank, lambda: Path(os.environ[GATE]).write_text("open"))
    assert checkpointer.wait(150)
    metrics = checkpointer.metrics()
    assert metrics["ckpt/failures"] == metrics["ckpt/in_flight"] == 0
    assert metrics["ckpt/last_committed_step"] == 2
    assert checkpointer.save(21, {}, {}, blocking=True)
    checkpointer.close()


def damaged(rank: int, size: int, run: str, store: str) -> None:
    """A flipped bit, a missing end, or each file missing in turn in the newest checkpoint.

    Every rank restores the one before it, whole. Without damage, and with a manifest of format 1,
    every rank restores the newest.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    checkpointer = make_checkpointer(world, engine, Path(run))
    digests = {}
    for step in (1, 2):
        train_step(engine, step)
        assert checkpointer.save(step, {}, {}, blocking=True)
        digests[step] = digest(full_state(engine))
    root = Path(run) / layout.FOLDER
    newest = root / "step_2"

    def check_restored(step: int) -> None:
        restored = checkpointer.restore()
        assert restored is not None and restored.step == step
        assert digest(full_state(engine)) == digests[step]
        assert layout.read_latest(root) == f"step_{step}"
        dist.barrier()

    def repair(path: Path, data: bytes) -> None:
        (root / "step_2.corrupt").rename(newest)
        path.write_bytes(data)

    files = sorted(path for path in newest.rglob("*") if path.is_file())
    assert len(files) == 12, files
    for path in files:
        data = path.read_bytes()
        dist.barrier()
        flipped = bytearray(data)
        flipped[len(data) // 3] ^= 16
        for damage in (
            partial(path.write_bytes, flipped),
            partial(path.write_bytes, data[:-1]),
            path.unlink,
        ):
            _only_main(rank, damage)
            check_restored(1)
            _only_main(rank, partial(repair, path, data))
    check_restored(2)
    _only_main(rank, partial(as_format_1, newest))
    check_restored(2)
    checkpointer.close()


def late(rank: int, size: int, run: str, store: str, view: str) -> None:
    """Rank 1 sees the folder through a file system whose names lag behind.

    It waits, and nothing is taken for damaged.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    checkpointer = make_checkpointer(world, engine, Path(run))
    for step in (1, 2):
        train_step(engine, step)
        assert checkpointer.save(step, {}, {}, blocking=True)
    saved = digest(full_state(engine))
    checkpointer.close()
    real = Path(run) / layout.FOLDER
    lagging = Path(view) / layout.FOLDER
    if rank == 1:
        lagging.mkdir(parents=True)
        (lagging / "step_1").symlink_to(real / "step_1")
        threading.Timer(0.5, lambda: (lagging / "step_2").symlink_to(real / "step_2")).start()
    checkpointer = make_checkpointer(world, engine, Path(view if rank == 1 else run), 2)
    train_step(engine, 3)
    restored = checkpointer.restore()
    assert restored is not None and restored.step == 2 and digest(full_state(engine)) == saved
    assert not list(real.glob("*.corrupt"))
    checkpointer.close()


def as_format_1(folder: Path) -> None:
    """Rewrite the manifest in format 1, with one checksum per file."""
    made = manifests.read(folder)
    body = json.loads(made.encode())
    del body["digest"], body["chunk_bytes"]
    files = {
        name: [size, xxh3_128_hexdigest((folder / name).read_bytes())]
        for name, (size, _) in made.files.items()
    }
    body |= {"format": 1, "files": files}
    body["digest"] = xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    (folder / manifests.NAME).write_text(json.dumps(body))


def _only_main(rank: int, action: Callable[[], object]) -> None:
    """Run ``action`` on rank 0; all ranks wait before and after."""
    dist.barrier()
    if rank == 0:
        action()
    dist.barrier()
