"""What the ranks of the checkpoint tests run."""

from __future__ import annotations

import itertools
import json
import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_128, xxh3_128_hexdigest

from tests.checkpoint.gate import GATE
from tests.checkpoint.tiny import full_state, join, make_engine, train_step
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import commit
from trainer.checkpoint.store import manifest as manifests

LIMIT_S = 200.0
"""Longest wait in a save: no busy machine's."""


def digest(state: dict[str, torch.Tensor]) -> str:
    whole = xxh3_128()
    for name in sorted(state):
        whole.update(name.encode())
        whole.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def checkpointer(
    world: Any, engine: Any, run: Path, attempt: int = 1, **settings: Any
) -> Checkpointer:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    chosen = CheckpointSettings(timeout_s=LIMIT_S, **settings)
    return Checkpointer(
        run,
        engine.ds,
        chosen,
        rank=world.rank,
        world_size=world.size,
        attempt=attempt,
        config_hash="tests",
        local_world_size=world.size,
        group=world.cpu_group,
    )


def endless(rank: int, size: int, run: str, store: str, attempt: int) -> None:
    """Train and save each step until killed. The output says what was restored and what was
    committed; a restored state must have the digest that the state had when it was saved.
    """
    began = time.perf_counter()
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1, seed=attempt)
    keeper = checkpointer(world, engine, Path(run), attempt, keep_last=3)
    restored = keeper.restore()
    step = restored.step if restored else 0
    if restored is not None:
        state = digest(full_state(engine))
        assert state == restored.global_state["digest"], "a half checkpoint was loaded"
        assert restored.rank_state == {"rank": rank, "step": step}
    if rank == 0:
        os.write(1, f"restored {step} {time.perf_counter() - began:.2f}\n".encode())
    told = step
    for step in itertools.count(told + 1):
        keeper.before_step()
        train_step(engine, step)
        state = digest(full_state(engine))
        keeper.save(step, {"rank": rank, "step": step}, {"digest": state}, float(step))
        committed = int(keeper.metrics()["ckpt/last_committed_step"])
        if rank == 0 and committed > told:
            os.write(1, f"committed {committed}\n".encode())
            told = committed


def elastic(rank: int, size: int, run: str, store: str, legs: list[dict[str, Any]]) -> None:
    """Per leg: an engine of another start, restored, compared with the state that was saved,
    trained on, saved.
    """
    world = join(rank, size, Path(store))
    for leg in legs:
        folder = Path(run) / leg["run"]
        if rank == 0:
            folder.mkdir(exist_ok=True)
        dist.barrier()
        engine = make_engine(world, stage=leg["stage"], bf16=leg["bf16"], seed=leg["attempt"])
        keeper = checkpointer(world, engine, folder, leg["attempt"])
        restored = keeper.restore()
        step = restored.step if restored else 0
        assert step == leg["expect"], f"{leg}: restored {step}"
        if restored is not None:
            have, want = full_state(engine), torch.load(folder / f"state_{step}.pt")
            assert [s["rank"] for s in restored.rank_states] == list(
                range(restored.manifest.world_size)
            )
            for name, tensor in want.items():
                weight = (
                    name.endswith("/fp32") and name not in have
                )  # stage 0 steps the weights themselves
                found = have[name.replace("/fp32", "/weight") if weight else name]
                assert torch.equal(found, tensor.to(found.dtype)), f"{leg}: {name}"
        for now in (step + 1, step + 2):
            keeper.before_step()
            train_step(engine, now)
        step += 2
        assert keeper.save(step, {"rank": rank}, {"step": step}, blocking=True)
        state = full_state(engine)
        if rank == 0:
            torch.save(state, folder / f"state_{step}.pt")
        keeper.close()
        dist.barrier()


def faults(rank: int, size: int, run: str, store: str, faults: list[str]) -> None:
    """Training goes on through each fault of the disk or the writer; the checkpoint before stays
    whole; when the fault is over the next save is as good as any.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    note, root = Path(os.environ["PLIMSOLL_FAULT"]), Path(run) / commit.FOLDER
    keeper = checkpointer(world, engine, Path(run), disk="tests.checkpoint.shims:FaultyDisk")
    patient = keeper._settings
    assert keeper.restore() is None
    assert keeper.save(1, {}, {}, blocking=True)
    step = 1
    for number, fault in enumerate(faults, 1):
        _only_main(rank, lambda text=fault: note.write_text(text))
        if fault == "hang":  # only then: on a busy machine a sound disk may take as long
            keeper._committer._settings = replace(patient, timeout_s=2.0)
        assert keeper.save(step + 1, {}, {})
        keeper.before_step()
        train_step(engine, step)
        assert keeper.wait(150)
        keeper._committer._settings = patient
        numbers = keeper.metrics()
        assert numbers["ckpt/failures"] == number and numbers["ckpt/last_committed_step"] == step, (
            fault,
            numbers,
        )
        dist.barrier()
        newest = commit.newest_whole(root)
        assert newest is not None and newest[1].step >= step, fault
        assert commit.named(root) == f"step_{step}", fault
        _only_main(rank, note.unlink)
        assert keeper.save(step + 2, {}, {}, blocking=True), (fault, keeper.metrics())
        step += 2
        dist.barrier()
        # Of a failed save nothing is left but, if it failed after the rename, a whole checkpoint.
        rest = {p.name for p in root.iterdir()} - {
            "latest",
            *(f"step_{s}" for s in (step, step - 1, step - 2)),
        }
        assert not rest, (fault, rest)
    keeper.close()


def slow(rank: int, size: int, run: str, store: str) -> None:
    """A disk that takes longer than 20 steps: training doesn't wait, saves are put off and
    counted.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    keeper = checkpointer(world, engine, Path(run), disk="tests.checkpoint.gate:GateDisk")
    begun = []
    for step in range(1, 21):
        train_step(engine, step)
        if keeper.save(step, {}, {}):
            begun.append(step)
        keeper.before_step()
        assert keeper.metrics()["ckpt/in_flight"] == min(step, 2)
    numbers = keeper.metrics()
    assert (
        begun == [1, 2]
        and numbers["ckpt/skipped"] == 18
        and numbers["ckpt/last_committed_step"] == -1
    ), numbers
    _only_main(rank, lambda: Path(os.environ[GATE]).write_text("open"))
    assert keeper.wait(150)
    numbers = keeper.metrics()
    assert (
        numbers["ckpt/failures"] == numbers["ckpt/in_flight"] == 0
        and numbers["ckpt/last_committed_step"] == 2
    )
    assert keeper.save(21, {}, {}, blocking=True)
    keeper.close()


def damaged(rank: int, size: int, run: str, store: str) -> None:
    """A flipped bit, a missing end, a missing file, in each file of the newest checkpoint: every
    rank gets the one before it, whole. Without damage, and with a manifest of format 1, the newest.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    keeper = checkpointer(world, engine, Path(run))
    digests = {}
    for step in (1, 2):
        train_step(engine, step)
        assert keeper.save(step, {}, {}, blocking=True)
        digests[step] = digest(full_state(engine))
    root = Path(run) / commit.FOLDER

    def restored(step: int) -> None:
        found = keeper.restore()
        assert (
            found is not None and found.step == step and digest(full_state(engine)) == digests[step]
        )
        assert commit.named(root) == f"step_{step}"
        dist.barrier()

    def mend(name: str, data: bytes) -> None:
        (root / "step_2.corrupt").rename(root / "step_2")
        (root / "step_2" / name).write_bytes(data)

    files = sorted(
        str(p.relative_to(root / "step_2")) for p in (root / "step_2").rglob("*") if p.is_file()
    )
    assert len(files) == 12, files
    for name in files:
        path = root / "step_2" / name
        data = path.read_bytes()
        dist.barrier()
        flipped = bytearray(data)
        flipped[len(data) // 3] ^= 16
        for harm in (
            lambda p, b=flipped: p.write_bytes(b),
            lambda p, b=data: p.write_bytes(b[:-1]),
            Path.unlink,
        ):
            _only_main(rank, lambda h=harm, p=path: h(p))
            restored(1)
            _only_main(rank, lambda n=name, b=data: mend(n, b))
    restored(2)
    _only_main(rank, lambda: as_format_1(root / "step_2"))
    restored(2)
    keeper.close()


def late(rank: int, size: int, run: str, store: str, view: str) -> None:
    """Rank 1 sees the folder through a file system whose names lag behind: it waits, and nothing is
    called damaged.
    """
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    keeper = checkpointer(world, engine, Path(run))
    for step in (1, 2):
        train_step(engine, step)
        assert keeper.save(step, {}, {}, blocking=True)
    saved = digest(full_state(engine))
    keeper.close()
    real, seen = Path(run) / commit.FOLDER, Path(view) / commit.FOLDER
    if rank == 1:
        seen.mkdir(parents=True)
        (seen / "step_1").symlink_to(real / "step_1")
        threading.Timer(0.5, lambda: (seen / "step_2").symlink_to(real / "step_2")).start()
    keeper = checkpointer(world, engine, Path(view if rank == 1 else run), 2)
    train_step(engine, 3)
    restored = keeper.restore()
    assert restored is not None and restored.step == 2 and digest(full_state(engine)) == saved
    assert not list(real.glob("*.corrupt"))
    keeper.close()


def as_format_1(folder: Path) -> None:
    """The manifest as the format before would have written it: one checksum for a whole file."""
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
    """``action`` on rank 0, with everybody waiting before and after."""
    dist.barrier()
    if rank == 0:
        action()
    dist.barrier()
