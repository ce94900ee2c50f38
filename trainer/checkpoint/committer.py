"""The thread that brings a save from host memory to a committed checkpoint: write, meet the others,
publish, retain.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trainer.base.errors import UserError
from trainer.checkpoint.metrics import Numbers
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot.planner import Plan
from trainer.checkpoint.store import commit
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store import retention as policy
from trainer.checkpoint.store.commit import temp_dir
from trainer.checkpoint.store.commit_store import Meeting, OutOfTime
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.lease import Lease
from trainer.checkpoint.store.manifest import Damaged, Manifest
from trainer.checkpoint.store.mirror import Mirror
from trainer.checkpoint.writer.client import WriteFailed, WriterClient
from trainer.checkpoint.writer.pace import Pace
from trainer.checkpoint.writer.progress import Filled


@dataclass
class Save:
    """One checkpoint on its way from the engine to the disk."""

    plan: Plan
    slot: int
    manifest: Manifest
    """Without files, until they are written."""
    filled: Filled = field(default_factory=Filled)
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    committed: bool = False

    @property
    def step(self) -> int:
        """The step it is of."""
        return self.manifest.step


class Committer:
    """Takes saves in turn. No error leaves it: each is told to ``numbers``, and the next save is
    tried.
    """

    def __init__(
        self,
        root: Path,
        settings: CheckpointSettings,
        disk: Disk,
        *,
        writer: WriterClient,
        meeting: Meeting,
        numbers: Numbers,
        fence: str,
        slots: int,
        lease: Lease | None,
        mirror: Mirror | None,
    ) -> None:
        self.root, self._settings, self._disk, self._fence = root, settings, disk, fence
        self._writer, self._meeting, self._numbers = writer, meeting, numbers
        self._lease, self._mirror = lease, mirror
        self._slots, self._free = slots, set(range(slots))
        self.pace = Pace(
            settings.write_share, longest_s=settings.timeout_s / 4
        )  # far from what counts as a dead disk
        """Of the writer: ``hurry`` when somebody waits for a save."""
        self._lock = threading.Lock()
        self._queue: queue.Queue[Save | None] = queue.Queue()
        self._closing = threading.Event()
        self._metrics_of: dict[int, float | None] = {}
        self._thread = threading.Thread(target=self._run, name="checkpoint-commit", daemon=True)
        self._thread.start()

    @property
    def in_flight(self) -> int:
        """Saves begun and not yet ended."""
        with self._lock:
            return self._slots - len(self._free)

    @property
    def has_room(self) -> bool:
        """Whether a host buffer is free."""
        return self.in_flight < self._slots

    def take_slot(self) -> int:
        """A free host buffer, the first one where it is free, given back when its save has
        ended.
        """
        with self._lock:
            slot = min(self._free)
            self._free.remove(slot)
            return slot

    def put(self, save: Save) -> None:
        """Commit ``save`` once it is copied."""
        self._queue.put(save)

    def wait_until_idle(self, timeout_s: float) -> bool:
        """False: out of time."""
        until = time.monotonic() + timeout_s
        self.pace.hurry()
        while self.in_flight:
            if time.monotonic() > until or not self._thread.is_alive():
                return False
            time.sleep(0.005)
        return True

    def close(self, timeout_s: float) -> bool:
        """Let what was begun end, at most ``timeout_s``, then give it up. False: a disk still holds
        the thread.
        """
        self._queue.put(None)
        self.pace.hurry()
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(10.0)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (save := self._queue.get()) is not None:
            try:
                save.committed = self._commit(save)
            except Exception as error:
                self._numbers.fail(
                    f"checkpoint of step {save.step} failed: {type(error).__name__}: {error}"
                )
            finally:
                with self._lock:
                    self._free.add(save.slot)
            # The buffer is free and the other ranks know: a slow upload to the mirror holds up
            # neither.
            if save.committed and self._meeting.rank == 0:
                self._after_commit(save.manifest)
            save.done.set()
            if self._queue.empty():
                self.pace.ease()

    def _commit(self, save: Save) -> bool:
        """Write this rank's files, meet the others, and on rank 0 publish. False: failed and
        told.
        """
        save.filled.beyond(0)
        began = time.perf_counter()
        try:
            message: dict[str, Any] = {"records": self._write(save)}
        except WriteFailed as error:
            message = {"error": f"rank {self._meeting.rank}: {error}"}
        outcome = (
            self._lead(save, message) if self._meeting.rank == 0 else self._follow(save, message)
        )
        if "error" in outcome:
            self._numbers.fail(
                f"checkpoint of step {save.step} failed: {outcome['error']}; the one before it is "
                "intact"
            )
            return False
        seconds = time.perf_counter() - began - self.pace.extra_s
        self._numbers.committed(save.step, nbytes=save.plan.size, seconds=seconds)
        return True

    def _write(self, save: Save) -> dict[str, list[object]]:
        if save.filled.failed:
            raise WriteFailed("nothing was copied")
        return self._writer.write(
            temp_dir(self.root, save.step, self._fence),
            save.plan.files,
            buffer=save.slot,
            size=save.plan.size,
            timeout_s=self._settings.timeout_s,
            filled=save.filled,
            pace=self.pace,
            cancelled=self._closing.is_set,
        )

    def _lead(self, save: Save, own: dict[str, Any]) -> dict[str, Any]:
        outcome = self._publish(save, own)
        self._meeting.tell(f"outcome/{save.step}", outcome)
        self._meeting.part(f"{save.step}", ("written", "outcome"))
        return outcome

    def _follow(self, save: Save, own: dict[str, Any]) -> dict[str, Any]:
        try:
            self._meeting.tell(f"written/{save.step}", own)
            outcome: dict[str, Any] = self._meeting.hear(
                f"outcome/{save.step}", 0, self._closing.is_set
            )
            self._meeting.tell(f"heard/{save.step}", True)
        except OutOfTime as error:
            return {"error": str(error)}
        return outcome

    def _publish(self, save: Save, own: dict[str, Any]) -> dict[str, Any]:
        try:
            messages = [own] + [
                self._meeting.hear(f"written/{save.step}", rank, self._closing.is_set)
                for rank in range(1, self._meeting.size)
            ]
            errors = [m["error"] for m in messages if "error" in m]
            if errors:
                raise WriteFailed("; ".join(errors))
            if self._lease is not None and not self._lease.still_mine():
                raise WriteFailed("a later job has taken this run folder")
            files = {
                name: record for message in messages for name, record in message["records"].items()
            }
            save.manifest = replace(save.manifest, created=time.time(), files=files)
            commit.publish(self._disk, self.root, save.manifest, self._fence)
        except (OSError, WriteFailed, OutOfTime) as error:
            with contextlib.suppress(OSError):
                self._disk.rmtree(temp_dir(self.root, save.step, self._fence))
            return {"error": str(error)}
        return {"step": save.step}

    def _after_commit(self, manifest: Manifest) -> None:
        """The checkpoint is committed; what fails here is told, and mended by the next save."""
        try:
            commit.point_latest(self._disk, self.root, manifest.step, self._fence)
            kept = self._retain()
            if self._mirror is not None:
                self._mirror.upload(commit.step_dir(self.root, manifest.step), manifest)
                self._mirror.keep_only(kept)
        except Exception as error:  # also what a mirror's client raises
            self._numbers.fail(
                f"after the commit of step {manifest.step}: {type(error).__name__}: {error}"
            )

    def _retain(self) -> set[int]:
        steps = commit.steps_on_disk(self.root)
        for step in steps:
            if step not in self._metrics_of:
                with contextlib.suppress(Damaged, UserError):
                    read = manifests.read(commit.step_dir(self.root, step))
                    same = read.metric_name == self._settings.best_metric
                    self._metrics_of[step] = read.metric if same else None
        keep = policy.kept(
            steps,
            keep_last=self._settings.keep_last,
            keep_every=self._settings.keep_every,
            keep_best=self._settings.keep_best,
            metrics=self._metrics_of,
            best=self._settings.best,
        )
        commit.remove(self._disk, self.root, sorted(set(steps) - keep))
        return keep
