"""One life of a run without a model worth its name: start, restore, save, end, on a disk that may
end it anywhere.

Everything is the real thing but DeepSpeed, whose part two tensors take, and the writer, which works
in the same process, so that one counter numbers every instant of a rank.
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

from tests.checkpoint.shims import CrashDisk, CrashStore
from trainer.checkpoint import checkpointer
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot import capture
from trainer.checkpoint.snapshot import host_buffer as buffers
from trainer.checkpoint.store import commit
from trainer.checkpoint.store.commit import FileSpec
from trainer.checkpoint.store.disk import load_disk
from trainer.checkpoint.writer.pace import Pace
from trainer.checkpoint.writer.progress import Filled


class Plain:
    """What the checkpoint room asks of a DeepSpeed engine (ZeRO stage 0)."""

    device = torch.device("cpu")
    checkpoint_engine: Any = None

    def __init__(self) -> None:
        self.module = nn.Linear(3, 2)
        self.optimizer = torch.optim.AdamW(self.module.parameters())
        self.global_steps = self.global_samples = self.skipped_steps = self.micro_steps = 0
        self.set(0)

    def set(self, step: int) -> None:
        """All of the state tells the step."""
        self.global_steps = step
        for param in self.module.parameters():
            param.data.fill_(step)
            moments = {
                name: torch.full_like(param, float(step)) for name in ("exp_avg", "exp_avg_sq")
            }
            self.optimizer.state[param] = {"step": torch.tensor(float(step)), **moments}

    def tells(self, step: int) -> bool:
        """Whether all of it is of ``step``."""
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


class Inside:
    """A writer in this process."""

    def __init__(self, buffers: Sequence[int], disk: str) -> None:
        self._buffers, self._disk = buffers, load_disk(disk)

    def write(
        self,
        folder: Path,
        files: Sequence[FileSpec],
        *,
        buffer: int,
        size: int,
        timeout_s: float,
        cancelled: Callable[[], bool],
        filled: Filled,
        pace: Pace,
    ) -> dict[str, list[object]]:
        while filled.beyond(size - 1, 100.0) < size:
            assert not filled.failed
        with (
            mmap.mmap(self._buffers[buffer], size, prot=mmap.PROT_READ) as whole,
            memoryview(whole) as data,
        ):
            return commit.write_files(self._disk, folder, files, data)

    def stop(self) -> None:
        pass


def life(
    rank: int, size: int, where: str, attempt: int, saves: int, settings: dict[str, Any]
) -> None:
    """Restore, tell by the line ``restored N`` what, and save ``saves`` steps more."""
    logging.disable(logging.ERROR)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(size), MASTER_ADDR="127.0.0.1")
    store = dist.FileStore(f"{where}/store{attempt}", size) if size > 1 else dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    checkpointer.WriterClient = Inside  # type: ignore[misc, assignment]
    capture.scripts = dict  # type: ignore[assignment]
    buffers._SLACK = 1 << 16
    engine = Plain()
    keeper = checkpointer.Checkpointer(
        Path(where, "run"),
        engine,
        CheckpointSettings(
            disk="tests.checkpoint.shims:CrashDisk", timeout_s=100.0, keep_last=2, **settings
        ),
        rank=rank,
        world_size=size,
        attempt=attempt,
        config_hash="tests",
    )
    if keeper._mirror is not None:
        keeper._mirror._fs = CrashStore(keeper._mirror._fs, CrashDisk())
    restored = keeper.restore()
    step = 0
    if restored is not None:
        step = restored.step
        assert engine.tells(step) and restored.rank_state == {"rank": rank, "step": step}
        assert restored.global_state == {"step": step}
    if rank == 0:
        os.write(1, f"restored {step}\n".encode())
    for _ in range(saves):
        step += 1
        engine.set(step)
        assert keeper.save(step, {"rank": rank, "step": step}, {"step": step}, blocking=True)
    assert keeper.metrics()["ckpt/failures"] == 0
    keeper.close()
