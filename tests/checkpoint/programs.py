"""What the ranks of the checkpoint tests run."""

from __future__ import annotations

import itertools
import logging
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from xxhash import xxh3_128

from tests.checkpoint.tiny import full_state, join, make_engine, train_step
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.settings import CheckpointSettings


def digest(state: dict[str, torch.Tensor]) -> str:
    whole = xxh3_128()
    for name in sorted(state):
        whole.update(name.encode())
        whole.update(state[name].contiguous().view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def checkpointer(world: Any, engine: Any, run: Path, attempt: int = 1, **settings: Any) -> Checkpointer:
    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    chosen = CheckpointSettings(timeout_s=settings.pop("limit_s", 60.0), **settings)
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
    """Train and save each step until killed. The output says what was restored and what was committed; a restored state
    must have the digest that the state had when it was saved."""
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
    """Per leg: an engine of another start, restored, compared with the state that was saved, trained on, saved."""
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
            assert [s["rank"] for s in restored.rank_states] == list(range(restored.manifest.world_size))
            for name, tensor in want.items():
                weight = name.endswith("/fp32") and name not in have  # stage 0 steps the weights themselves
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


def faults(rank: int, size: int, run: str, store: str, fault: str) -> None:
    """Training goes on through a fault of the disk or the writer; the checkpoint before stays whole."""
    world = join(rank, size, Path(store))
    engine = make_engine(world, stage=1)
    note = Path(os.environ["PLIMSOLL_FAULT"])
    keeper = checkpointer(world, engine, Path(run), disk="tests.checkpoint.shims:FaultyDisk", limit_s=2.0)
    assert keeper.restore() is None
    train_step(engine, 1)
    assert keeper.save(1, {}, {}, blocking=True)
    dist.barrier()
    if rank == 0:
        note.write_text(fault)
    dist.barrier()
    assert keeper.save(2, {}, {})
    assert keeper.wait(30)
    numbers = keeper.metrics()
    assert numbers["ckpt/failures"] == 1 and numbers["ckpt/last_committed_step"] == 1, numbers
    keeper.before_step()
    train_step(engine, 2)
    dist.barrier()
    if rank == 0:
        root = Path(run) / "checkpoints"
        assert sorted(p.name for p in root.iterdir()) == ["latest", "step_1"], list(root.iterdir())
        note.unlink()
    dist.barrier()
    assert keeper.save(3, {}, {}, blocking=True), keeper.metrics()
    keeper.close()
