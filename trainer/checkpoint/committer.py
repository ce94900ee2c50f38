"""The thread that brings a save from host memory to a committed checkpoint.

It writes this rank's files, exchanges the outcome with the other ranks, publishes the checkpoint on
rank 0, and removes old ones.
"""

from __future__ import annotations

import contextlib
import logging
import queue
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from trainer.checkpoint.metrics import CheckpointMetrics
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot.plan import SnapshotPlan
from trainer.checkpoint.store import commit
from trainer.checkpoint.store.catalog import Catalog
from trainer.checkpoint.store.checkpoint_folder import CheckpointFolder
from trainer.checkpoint.store.commit_store import CommitStore, CommitTimeout
from trainer.checkpoint.store.layout import step_dir, temp_dir
from trainer.checkpoint.store.manifest import Manifest
from trainer.checkpoint.store.retention import steps_to_keep
from trainer.checkpoint.store.room import is_full, make_room
from trainer.checkpoint.writer.client import WriteError, WriterClient
from trainer.checkpoint.writer.progress import FillProgress
from trainer.checkpoint.writer.throttle import WriteThrottle

log = logging.getLogger(__name__)
ROOM = "room"
WRITTEN = "written"
OUTCOME = "outcome"


@dataclass
class Save:
    """One checkpoint on its way from the engine to the disk."""

    plan: SnapshotPlan
    buffer: int
    """Number of its host buffer."""
    manifest: Manifest
    """Without files until they are written."""
    progress: FillProgress = field(default_factory=FillProgress)
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    committed: bool = False

    @property
    def step(self) -> int:
        """The step after which the state was saved."""
        return self.manifest.step


class Committer:
    """Commits saves in turn.

    No error leaves it: a failure is recorded in the metrics, and the next save is tried.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        settings: CheckpointSettings,
        *,
        writer: WriterClient,
        store: CommitStore,
        metrics: CheckpointMetrics,
        num_buffers: int,
    ) -> None:
        self._folder = folder
        self._settings = settings
        self._writer = writer
        self._store = store
        self._metrics = metrics
        self._num_buffers = num_buffers
        self._free_buffers = set(range(num_buffers))
        # A throttled save must stay far below what counts as a dead disk.
        self.throttle = WriteThrottle(settings.write_share, max_s=settings.timeout_s / 4)
        """Suspended while something waits for a save."""
        self._lock = threading.Lock()
        self._queue: queue.Queue[Save | None] = queue.Queue()
        self._closing = threading.Event()
        self._catalog = Catalog(folder.root)
        self._fitting: int | None = None
        """How many checkpoints the disk holds at most, once a save has run out of room although the
        disk showed enough (a quota).
        """
        self._thread = threading.Thread(target=self._run, name="checkpoint-commit", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Number of saves begun and not yet ended."""
        with self._lock:
            return self._num_buffers - len(self._free_buffers)

    @property
    def has_free_buffer(self) -> bool:
        """Whether a host buffer is free."""
        return self.in_flight < self._num_buffers

    def take_buffer(self) -> int:
        """Take a free host buffer, the first if it is free; it is returned when the save ends."""
        with self._lock:
            number = min(self._free_buffers)
            self._free_buffers.remove(number)
            return number

    def add_verified(self, manifest: Manifest) -> None:
        """Record a checkpoint of the run that a restore has verified."""
        self._catalog.add(manifest)

    def submit(self, save: Save) -> None:
        """Write ``save`` while it is being copied, and commit it."""
        self._queue.put(save)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """Wait until no save is in flight, written at full speed. False: out of time."""
        deadline = time.monotonic() + timeout_s
        self.throttle.suspend()
        while self.in_flight:
            if time.monotonic() > deadline or not self._thread.is_alive():
                return False
            time.sleep(0.005)
        return True

    def close(self, timeout_s: float) -> bool:
        """Let the saves in flight end, at most ``timeout_s``, then give them up.

        False: the thread is still blocked by a disk.
        """
        self._queue.put(None)
        self.throttle.suspend()
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(10.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            save = self._queue.get()
            if save is None:
                return
            try:
                save.committed = self._commit(save)
            except Exception as error:
                self._metrics.record_failure(
                    f"checkpoint of step {save.step} failed: {type(error).__name__}: {error}"
                )
            finally:
                with self._lock:
                    self._free_buffers.add(save.buffer)
            # The buffer is free and the other ranks have the outcome: a slow upload to the mirror
            # delays neither.
            if save.committed and self._store.rank == 0:
                self._after_commit(save.manifest)
            save.done.set()
            if self._queue.empty():
                self.throttle.resume()

    def _commit(self, save: Save) -> bool:
        """Write this rank's files, exchange outcomes, publish on rank 0. False: the save failed."""
        save.progress.wait_for_more(0)
        began = time.perf_counter()
        try:
            self._wait_for_room(save)
            message: dict[str, Any] = {"records": self._write(save)}
        except (WriteError, CommitTimeout) as error:
            message = {"error": f"rank {self._store.rank}: {error}"}
        if self._store.rank == 0:
            outcome = self._collect_and_publish(save, message)
        else:
            outcome = self._report_and_wait(save, message)
        if "error" in outcome:
            if is_full(outcome["error"]):
                self._fitting = len(self._catalog.checkpoints())
            self._metrics.record_failure(
                f"checkpoint of step {save.step} failed: {outcome['error']}; the one before it is "
                "intact"
            )
            return False
        seconds = time.perf_counter() - began - self.throttle.delay_s
        self._metrics.record_commit(save.step, nbytes=save.plan.size, seconds=seconds)
        return True

    def _wait_for_room(self, save: Save) -> None:
        """Before any rank writes, rank 0 makes room. Raises WriteError when there is none."""
        shortage: str | None = None
        topic = f"{ROOM}/{save.step}"
        if self._store.rank == 0:
            try:
                shortage = self._make_room(save.manifest)
            except OSError as error:
                log.warning("no room could be made for step %d: %s", save.step, error)
            self._store.put(topic, shortage)
        else:
            shortage = self._store.get(topic, 0, self._closing.is_set)
        if shortage is not None:
            raise WriteError(shortage)

    def _make_room(self, manifest: Manifest) -> str | None:
        """Remove early what retention would remove once ``manifest`` is committed, if need be."""
        checkpoints = self._catalog.checkpoints()
        best = self._kept(checkpoints, keep_last=1)
        stay = self._kept({**checkpoints, manifest.step: manifest}) | best
        return make_room(
            self._folder.disk,
            self._folder.root,
            self._catalog,
            [step for step in checkpoints if step not in stay],
            at_least_one=self._fitting is not None and len(checkpoints) >= self._fitting,
        )

    def _write(self, save: Save) -> dict[str, list[object]]:
        if save.progress.failure:
            raise WriteError(save.progress.failure)
        return self._writer.write(
            temp_dir(self._folder.root, save.step, self._folder.fence),
            save.plan.files,
            buffer=save.buffer,
            size=save.plan.size,
            timeout_s=self._settings.timeout_s,
            progress=save.progress,
            throttle=self.throttle,
            cancelled=self._closing.is_set,
        )

    def _collect_and_publish(self, save: Save, message: dict[str, Any]) -> dict[str, Any]:
        """On rank 0: returns the outcome of the save, which all ranks get."""
        outcome = self._publish(save, message)
        self._store.put(f"{OUTCOME}/{save.step}", outcome)
        self._store.finish(f"{save.step}", (ROOM, WRITTEN, OUTCOME))
        return outcome

    def _report_and_wait(self, save: Save, message: dict[str, Any]) -> dict[str, Any]:
        """On the other ranks: returns the outcome of the save."""
        try:
            self._store.put(f"{WRITTEN}/{save.step}", message)
            outcome: dict[str, Any] = self._store.get(
                f"{OUTCOME}/{save.step}", 0, self._closing.is_set
            )
            self._store.acknowledge(f"{save.step}")
        except CommitTimeout as error:
            return {"error": str(error)}
        return outcome

    def _publish(self, save: Save, message: dict[str, Any]) -> dict[str, Any]:
        """Commit the checkpoint when all ranks have written their files."""
        folder = self._folder
        try:
            messages = [message]
            for rank in range(1, self._store.world_size):
                topic = f"{WRITTEN}/{save.step}"
                messages.append(self._store.get(topic, rank, self._closing.is_set))
            errors = [message["error"] for message in messages if "error" in message]
            if errors:
                raise WriteError("; ".join(errors))
            if folder.is_taken_over:
                raise WriteError("a later job has taken this run folder")
            files: dict[str, list[Any]] = {}
            for message in messages:
                files |= message["records"]
            save.manifest = replace(save.manifest, created=time.time(), files=files)
            commit.publish(folder.disk, folder.root, save.manifest, folder.fence)
        except (OSError, WriteError, CommitTimeout) as error:
            with contextlib.suppress(OSError):
                folder.disk.rmtree(temp_dir(folder.root, save.step, folder.fence))
            return {"error": str(error)}
        return {"step": save.step}

    def _after_commit(self, manifest: Manifest) -> None:
        """Update ``latest``, old checkpoints and the mirror; the next save repairs what fails."""
        folder = self._folder
        self._catalog.add(manifest)
        try:
            commit.point_latest(folder.disk, folder.root, manifest.step, folder.fence)
            kept_steps = self._remove_old()
            if folder.mirror is not None:
                folder.mirror.upload(step_dir(folder.root, manifest.step), manifest)
                folder.mirror.keep_only(kept_steps)
        except Exception as error:  # includes those of a mirror's client
            self._metrics.record_failure(
                f"after the commit of step {manifest.step}: {type(error).__name__}: {error}",
                committed=True,
            )

    def _remove_old(self) -> set[int]:
        """Remove checkpoints by the retention settings. Returns the steps that stay."""
        checkpoints = self._catalog.checkpoints()
        keep = self._kept(checkpoints)
        commit.remove(self._folder.disk, self._folder.root, sorted(checkpoints.keys() - keep))
        return keep

    def _kept(
        self, checkpoints: Mapping[int, Manifest], *, keep_last: int | None = None
    ) -> set[int]:
        """The steps that stay by the retention settings."""
        settings = self._settings
        return steps_to_keep(
            list(checkpoints),
            keep_last=keep_last or settings.keep_last,
            keep_every=settings.keep_every,
            keep_best=settings.keep_best,
            metrics={
                step: manifest.metric
                for step, manifest in checkpoints.items()
                if manifest.metric_name == settings.best_metric
            },
            best_mode=settings.best_mode,
            unhealthy=[step for step, manifest in checkpoints.items() if not manifest.healthy],
        )
