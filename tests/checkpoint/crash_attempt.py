"""One attempt of a run without a real model: start, restore, save, end, on a disk that may kill it.

Everything is real except DeepSpeed, replaced by two tensors, and the writer, which works in the
same process, so that one counter numbers all operations of a rank.
"""

from __future__ import annotations

import logging
import mmap
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.checkpoint.disks import CrashDisk, CrashStore
from trainer.checkpoint import checkpointer as checkpointer_module
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot import capture, host_buffer
from trainer.checkpoint.store.commit import FileSpec, write_files
from trainer.checkpoint.store.disk import load_disk
from trainer.checkpoint.writer.progress import FillProgress
from trainer.checkpoint.writer.throttle import WriteThrottle
from trainer.ranks.world import World


class FakeEngine:
    """What the checkpointer needs of a DeepSpeed engine (ZeRO stage 0)."""

    device = torch.device("cpu")
    checkpoint_engine: Any = None

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.global_steps = 0
        self.global_samples = 0
        self.skipped_steps = 0
        self.micro_steps = 0
        self.set(0)

    def set(self, step: int) -> None:
        """Fill all of the state with the number ``step``."""
        self.global_steps = step
        for param in self.module.parameters():
            param.data.fill_(step)
            moments = {
                name: torch.full_like(param, float(step)) for name in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[param] = {"step": torch.tensor(float(step)), **moments}

    def is_at(self, step: int) -> bool:
        """Whether all of the state is of ``step``."""
        state = [t for values in self.optimizer.state.values() for t in values.values()]
        return self.global_steps == step and all(
            bool((t == step).all()) for t in [*self.module.parameters(), *state]
        )

    def zero_optimization_stage(self) -> int:
        return 0

    def _copy_recovery_script(self, path: str) -> None:
        pass

    def save_checkpoint(
        self, folder: str, tag: str, client_state: dict[str, Any], save_latest: bool
    ) -> None:
        if dist.get_rank() == 0:
            state = {"module": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            self.checkpoint_engine.save(state, f"{tag}/mp_rank_00_model_states.pt")


class InProcessWriter:
    """A writer in this process."""

    def __init__(self, buffer_fds: Sequence[int], disk_spec: str) -> None:
        self._buffer_fds = buffer_fds
        self._disk = load_disk(disk_spec)

    def write(
        self,
        folder: Path,
        files: Sequence[FileSpec],
        *,
        buffer: int,
        size: int,
        timeout_s: float,
        cancelled: Callable[[], bool],
        progress: FillProgress,
        throttle: WriteThrottle,
    ) -> dict[str, list[object]]:
        while progress.wait_for_more(size - 1, 100.0) < size:
            assert not progress.failure
        with (
            mmap.mmap(self._buffer_fds[buffer], size, prot=mmap.PROT_READ) as whole,
            memoryview(whole) as data,
        ):
            return write_files(self._disk, folder, files, data)

    def stop(self) -> None:
        pass


def make_world(rank: int, size: int, store: dist.Store) -> World:
    """Initialize the process group of this rank."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return World(
        rank=rank,
        size=size,
        local_rank=rank,
        device=torch.device("cpu"),
        cpu_group=dist.group.WORLD,
    )


def run_attempt(
    rank: int, size: int, where: str, attempt: int, saves: int, settings: dict[str, Any]
) -> None:
    """Restore, print ``restored N``, and save ``saves`` further steps."""
    logging.disable(logging.ERROR)
    store = dist.FileStore(f"{where}/store{attempt}", size) if size > 1 else dist.HashStore()
    world = make_world(rank, size, store)
    checkpointer_module.WriterClient = InProcessWriter  # type: ignore[misc, assignment]
    capture.deepspeed_scripts = dict  # type: ignore[assignment]
    host_buffer.SLACK_BYTES = 1 << 16
    engine = FakeEngine()
    checkpointer = checkpointer_module.Checkpointer(
        Path(where, "run"),
        engine,
        CheckpointSettings(
            disk="tests.checkpoint.disks:CrashDisk", timeout_s=100.0, keep_last=2, **settings
        ),
        world,
        attempt=attempt,
        config_hash="tests",
    )
    mirror = checkpointer._folder.mirror
    if mirror is not None:
        mirror._fs = CrashStore(mirror._fs, CrashDisk())
    restored = checkpointer.restore()
    step = 0
    if restored is not None:
        step = restored.step
        assert engine.is_at(step) and restored.rank_state == {"rank": rank, "step": step}
        assert restored.global_state == {"step": step}
    if rank == 0:
        os.write(1, f"restored {step}\n".encode())
    for _ in range(saves):
        step += 1
        engine.set(step)
        assert checkpointer.save(step, {"rank": rank, "step": step}, {"step": step}, blocking=True)
    assert checkpointer.metrics()["ckpt/failures"] == 0
    checkpointer.close()


def restore_old(rank: int, size: int, run: str) -> None:
    """Restore the newest checkpoint of ``old_checkpoints.tar.xz``; see ``test_old_checkpoints``."""
    world = make_world(rank, size, dist.HashStore())
    engine = FakeEngine()
    extra_tensors = {"reference.a": torch.zeros(5)}
    checkpointer = checkpointer_module.Checkpointer(
        Path(run),
        engine,
        CheckpointSettings(),
        world,
        attempt=2,
        config_hash="tests",
        extra_tensors=extra_tensors,
    )
    restored = checkpointer.restore()
    checkpointer.close()
    assert restored is not None and restored.step == 2 and engine.is_at(2)
    assert restored.manifest.metric == 0.5 and restored.manifest.metric_name == "val/reward"
    assert restored.rank_state == {"python": (3, (1, 2), None), "rank": 0}
    assert restored.global_state == {"kl": {"value": 0.5}, "step": 2}
    assert torch.equal(extra_tensors["reference.a"], torch.arange(5.0))
