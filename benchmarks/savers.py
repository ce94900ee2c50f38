"""Ways to save the state of an engine behind one interface: ours and those of others. For
comparison only.
"""

from __future__ import annotations

import logging
import os
import shutil
import threading
from concurrent.futures import Future
from pathlib import Path
from time import perf_counter
from typing import Any

import deepspeed
import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import (
    AsyncCheckpointerType,
    AsyncSaveResponse,
    async_save,
)

from trainer.checkpoint.checkpointer import Checkpointer
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import manifest
from trainer.parallel.engine import Engine

LIMIT_S = 300.0
POLL_S = 0.005


class Saver:
    """A way to save: ``save``, then ``before_step`` before the weights change.

    ``ended`` is when the last save was complete, on the clock of ``perf_counter``.
    """

    name: str
    synced: str
    """What it makes durable by fsync."""
    checksums = "-"
    blocks = True
    """Whether ``save`` is the whole save."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.engine, self.folder = engine, folder
        folder.mkdir()
        self.ended = 0.0

    def save(self, step: int) -> None:
        """Begin to save, or save."""
        self.write(step, self.folder / f"step_{step}")
        self.ended = perf_counter()

    def write(self, step: int, path: Path) -> None:
        """The whole save of a way that blocks."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Wait until the weights may change."""

    def busy(self) -> bool:
        """Whether something is still being written."""
        return False

    def wait(self) -> None:
        """Wait until the last save is complete."""

    def clear(self) -> None:
        """Delete what has been saved."""
        for path in self.folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def close(self) -> None:
        """End what runs in the background."""

    def state(self) -> dict[str, Any]:
        """Weights and optimizer state."""
        return {
            "module": self.engine.module.state_dict(),
            "optimizer": self.engine.optimizer.state_dict(),
        }


class TorchSave(Saver):
    name = "torch.save"
    synced = "nothing"

    def write(self, step: int, path: Path) -> None:
        torch.save(self.state(), path)


class TorchSaveSynced(Saver):
    name = "torch.save + fsync"
    synced = "the file"

    def write(self, step: int, path: Path) -> None:
        with path.open("wb") as file:
            torch.save(self.state(), file)
            file.flush()
            os.fsync(file.fileno())


class DeepSpeedSave(Saver):
    name = "DeepSpeed save_checkpoint"
    synced = "nothing"

    def write(self, step: int, path: Path) -> None:
        self.engine.ds.save_checkpoint(str(path), tag=f"global_step{step}")


class DcpAsync(Saver):
    """Its defaults: a thread, and host memory allocated anew for each save, which is staged before
    ``async_save`` returns.
    """

    name = "DCP async_save"
    synced = "its files"
    blocks = False
    checkpointer = AsyncCheckpointerType.THREAD

    def __init__(self, engine: Engine, folder: Path) -> None:
        super().__init__(engine, folder)
        self.stager: DefaultStager | None = None
        self._staged: Future[None] | None = None
        self._done: Future[Any] | None = None

    def save(self, step: int) -> None:
        path = self.folder / f"step_{step}"
        response = async_save(
            self.state(),
            checkpoint_id=path,
            async_checkpointer_type=self.checkpointer,
            async_stager=self.stager,
        )
        if isinstance(response, AsyncSaveResponse):
            self._staged = response.staging_completion
            self._done = response.upload_completion
        else:
            self._done = response
        self._done.add_done_callback(lambda _: setattr(self, "ended", perf_counter()))

    def before_step(self) -> None:
        if self._staged is not None:
            self._staged.result(LIMIT_S)
            self._staged = None

    def busy(self) -> bool:
        return self._done is not None and not self._done.done()

    def wait(self) -> None:
        self.before_step()
        if self._done is not None:
            self._done.result(LIMIT_S)

    def close(self) -> None:
        if self.stager is not None:
            self.stager.close()


class DcpKept(DcpAsync):
    """Its best form in a thread: one stager for all saves, which stages in the background."""

    name = "DCP async_save, kept stager, thread"
    shared = False

    def __init__(self, engine: Engine, folder: Path) -> None:
        super().__init__(engine, folder)
        # Pinned memory and non-blocking copies are refused without a GPU.
        self.stager = DefaultStager(StagingOptions(False, self.shared, True, False))


class DcpKeptProcess(DcpKept):
    """Its best form in a process: staged in the background into memory that the process shares."""

    name = "DCP async_save, kept stager, process"
    checkpointer = AsyncCheckpointerType.PROCESS
    shared = True


class Ours(Saver):
    """The trainer's own checkpointer."""

    name = "plimsoll"
    synced = "files and folders"
    checksums = "xxh3-128"
    blocks = False

    def __init__(self, engine: Engine, folder: Path) -> None:
        super().__init__(engine, folder)
        self._checkpointer = Checkpointer(
            folder,
            engine.ds,
            CheckpointSettings(keep_last=1_000_000, timeout_s=LIMIT_S),
            engine.world,
            attempt=1,
            config_hash="benchmark",
        )
        self._watch = threading.Thread()

    def save(self, step: int) -> None:
        if not self._checkpointer.save(
            step, {"rng": torch.get_rng_state()}, {"samples_seen": step}
        ):
            raise RuntimeError("both host buffers are in use")
        self._watch = threading.Thread(target=self._wait_for, args=(step,), daemon=True)
        self._watch.start()

    def before_step(self) -> None:
        self._checkpointer.before_step()

    def busy(self) -> bool:
        return self._watch.is_alive()

    def wait(self) -> None:
        # As the trainer waits for its last save: from now on at full speed.
        self._checkpointer.wait(LIMIT_S)
        self._watch.join(LIMIT_S)

    def clear(self) -> None:
        for path in self._checkpointer.root.glob("step_*"):
            shutil.rmtree(path)

    def close(self) -> None:
        self._checkpointer.close()

    def metrics(self) -> dict[str, float]:
        """``ckpt/*`` of the last save."""
        return self._checkpointer.metrics()

    def problems(self) -> list[str]:
        """What is wrong with the newest checkpoint, read back in full."""
        newest = max(self._checkpointer.root.glob("step_*"), key=lambda p: int(p.name[5:]))
        return manifest.problems(newest, manifest.read(newest))

    def _wait_for(self, step: int) -> None:
        pause = threading.Event()
        until = perf_counter() + LIMIT_S
        while perf_counter() < until:
            metrics = self._checkpointer.metrics()
            if metrics["ckpt/failures"]:
                raise RuntimeError("a save failed; the log says why")
            if metrics["ckpt/last_committed_step"] == step and not metrics["ckpt/in_flight"]:
                self.ended = perf_counter()
                return
            pause.wait(POLL_S)


PEERS: tuple[type[Saver], ...] = (
    TorchSave,
    TorchSaveSynced,
    DcpAsync,
    DcpKept,
    DcpKeptProcess,
    DeepSpeedSave,
)


def quiet() -> None:
    """Silence DeepSpeed and DCP, which log every file."""
    deepspeed.utils.logger.setLevel(logging.ERROR)
    logging.getLogger("torch.distributed.checkpoint").setLevel(logging.ERROR)
