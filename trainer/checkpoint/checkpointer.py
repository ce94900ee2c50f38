"""Checkpoints as the training loop sees them: save at a step boundary, restore at start.

A save copies the state to host memory in the background, and is written and committed behind
training (``committer``).
"""

from __future__ import annotations

import contextlib
import logging
import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from trainer.base.errors import Failure, UserError
from trainer.checkpoint.best import find_best
from trainer.checkpoint.committer import Committer, Save
from trainer.checkpoint.metrics import CheckpointMetrics
from trainer.checkpoint.restore import (
    Restored,
    engine_reader,
    gather_persistent_parameters,
    load_engine,
    load_extra_tensors,
    load_states,
)
from trainer.checkpoint.resume import find_checkpoint, is_same_folder, record_resume
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot.finite import first_not_finite
from trainer.checkpoint.snapshot.fragments import zero_stage
from trainer.checkpoint.snapshot.host_buffer import HostBuffer, require_memory
from trainer.checkpoint.snapshot.plan import SnapshotPlan, fill
from trainer.checkpoint.snapshot.planner import CapturedState, SnapshotPlanner, snapshot_bytes
from trainer.checkpoint.store.checkpoint_folder import CheckpointFolder
from trainer.checkpoint.store.cleanup import quarantine
from trainer.checkpoint.store.commit_store import CommitStore
from trainer.checkpoint.store.manifest import DamagedError, Manifest
from trainer.checkpoint.store.manifest import unreadable as unreadable_file
from trainer.checkpoint.writer.client import WriterClient
from trainer.ranks.agreement import agreed, raise_on_all
from trainer.ranks.world import World

log = logging.getLogger(__name__)


class Checkpointer:
    """Saves and restores one run. Every rank makes one; ``save`` and ``restore`` are collective."""

    def __init__(
        self,
        run_dir: Path,
        ds_engine: Any,
        settings: CheckpointSettings,
        world: World,
        *,
        attempt: int,
        config_hash: str,
        extra_tensors: Mapping[str, torch.Tensor] | None = None,
        further_engines: Mapping[str, Any] | None = None,
    ) -> None:
        """Collective.

        ``further_engines``: DeepSpeed engines besides ``ds_engine``, by the folder of a checkpoint
        in which they are saved.

        ``extra_tensors``: tensors that are not the engine's, the same on every rank: rank 0 saves
        them, ``restore`` loads them. They change only after a call of ``before_step``. Raises
        UserError when the run folder can't be written, another job holds it, or host memory is too
        small for the snapshots.
        """
        self._engines = {"": ds_engine, **(further_engines or {})}
        self._settings = settings
        self._attempt = attempt
        self._config_hash = config_hash
        self._extra_tensors = dict(extra_tensors or {})
        self._world = world
        self._metrics = CheckpointMetrics()
        self._copying: Save | None = None
        self._folder = self._open_folder(run_dir)
        self._stream: torch.cuda.Stream | None = None
        if ds_engine.device.type == "cuda":
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._buffers = self._make_buffers()
        self._writer = WriterClient([buffer.fd for buffer in self._buffers], settings.disk)
        self._planner = SnapshotPlanner(
            self._engines,
            world.rank,
            self._extra_tensors,
            include_untrained=settings.include_untrained,
        )
        self._committer = Committer(
            self._folder,
            settings,
            writer=self._writer,
            store=CommitStore(world, timeout_s=settings.timeout_s),
            metrics=self._metrics,
            num_buffers=len(self._buffers),
        )

    def save(
        self,
        step: int,
        rank_state: dict[str, Any],
        global_state: dict[str, Any],
        metric: float | None = None,
        *,
        blocking: bool = False,
        healthy: bool = True,
        about: dict[str, Any] | None = None,
    ) -> bool:
        """Checkpoint the state after ``step``. Collective.

        Not blocking: returns once the background copy has begun; call ``before_step`` before the
        weights change. False: not begun, since all host buffers are in use (a slow disk): try again
        after the next step. Blocking: waits for the commit; True when the checkpoint is committed.
        Disk errors never raise: they are in ``metrics`` and in the log. ``metric``: the value for
        ``keep_best``. ``healthy``: False after a skipped optimizer step: retention counts it for
        nothing. ``about``: anything for people, written into the manifest. Raises UserError, on all
        ranks, when a weight or an optimizer state is not finite: nothing is saved then.
        """
        blocking = blocking or not self._settings.async_save
        began = time.perf_counter()
        self._wait_for_copy()
        if blocking:
            self._committer.wait_until_idle(self._settings.timeout_s)
        self._require_finite(step)
        if not self._world.all(self._committer.has_free_buffer):
            self._metrics.add("skipped")
            self._committer.throttle.suspend()
            return False
        captured = self._planner.capture(step, rank_state, global_state)
        manifest = self._make_manifest(step, metric, about or {}, healthy=healthy)
        save = Save(SnapshotPlan(), self._committer.take_buffer(), manifest)
        self._start_copy(save, captured)
        self._committer.submit(save)
        if blocking:
            self._committer.throttle.suspend()
            self._wait_for_copy()
            save.done.wait(self._settings.timeout_s * 2 + 60)
        self._metrics.add("stall_s", time.perf_counter() - began)
        return save.committed if blocking else True

    def before_step(self) -> None:
        """Wait for the rest of the copy. Call this before anything changes weights or optimizer."""
        began = time.perf_counter()
        self._wait_for_copy()
        self._metrics.add("stall_s", time.perf_counter() - began)

    def restore(self) -> Restored | None:
        """Load the newest whole checkpoint, the same on all ranks; None for a new run. Collective.

        A damaged checkpoint is renamed ``.corrupt``, and the one before it, or a newer one of the
        mirror, is taken. Raises UserError when a run that has had checkpoints has none left, for a
        checkpoint of another model, for a newer format and for a file that may not be read; Failure
        for one that can't be read for another reason.
        """
        if self._settings.resume_mode == "auto":
            self._fetch_newer()
        while True:
            found = find_checkpoint(
                self._folder.disk,
                self._folder.run_dir,
                self._settings,
                self._world,
                self._fetch_newer,
            )
            if found is None:
                return None
            restored = self._load(*found)
            if restored is not None:
                self._after_restore(restored)
                return restored

    def restore_best(self) -> Restored | None:
        """Load the run's checkpoint with the best metric, while it trains; None when there is none.
        Collective.

        Saves in flight end first. The steps after it stay on disk. Raises as ``restore`` does.
        """
        self.wait(self._settings.timeout_s)
        while True:
            found = find_best(self._folder.disk, self._folder.root, self._settings, self._world)
            if found is None:
                return None
            restored = self._load(*found)
            if restored is not None:
                return restored

    def metrics(self) -> dict[str, float]:
        """``ckpt/*`` since the start; ``ckpt/stall_s`` since the last call."""
        return self._metrics.collect(self._committer.in_flight)

    @property
    def root(self) -> Path:
        """The folder of the run's checkpoints."""
        return self._folder.root

    @property
    def last_committed_step(self) -> int | None:
        """Step of the newest checkpoint that this attempt committed or resumed from."""
        step = self._metrics.get("last_committed_step")
        return None if step is None or step < 0 else int(step)

    @property
    def save_s(self) -> float | None:
        """Seconds from the copy to the commit of the last save; None before the first."""
        return self._metrics.get("write_s")

    @property
    def last_failure(self) -> str:
        """Message of the last failed save; empty before the first."""
        return self._metrics.last_failure

    def wait(self, timeout_s: float) -> bool:
        """Wait until every save in flight is committed or has failed. False: out of time."""
        self.before_step()
        return self._committer.wait_until_idle(timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Let the saves in flight end, at most ``timeout_s``; stop the writer, drop the lease."""
        with contextlib.suppress(RuntimeError):
            self.before_step()
        ended = self._committer.close(timeout_s)
        self._writer.stop()
        if ended:
            for buffer in self._buffers:
                buffer.close()
        self._folder.close()

    def _require_finite(self, step: int) -> None:
        found: list[str | None] = []
        for ds in self._engines.values():
            found += self._world.gather(
                first_not_finite(ds, include_untrained=self._settings.include_untrained)
            )
        names = [name for name in found if name is not None]
        if not names:
            return
        self._committer.wait_until_idle(self._settings.timeout_s)
        saved = "No step was saved before"
        if self.last_committed_step is not None:
            saved = f"Step {self.last_committed_step}, saved before, is whole"
        raise UserError(
            f"Step {step} is not saved: {names[0]} holds NaN or infinity. {saved}. Lower "
            "actor_rollout_ref.actor.optim.lr or actor_rollout_ref.actor.grad_clip, and begin a "
            "new run from a checkpoint: trainer.resume_mode=path "
            f"trainer.resume_from_path={self._folder.root}/step_N "
            "trainer.default_local_dir=OTHER_FOLDER"
        )

    def _open_folder(self, run_dir: Path) -> CheckpointFolder:
        """Raises UserError when rank 0 can't open it."""
        fence = f"{self._attempt}-{self._world.broadcast(secrets.token_hex(3))}"
        folder = CheckpointFolder(run_dir, self._settings, attempt=self._attempt, fence=fence)
        with agreed(self._world):
            if self._world.is_main:
                folder.open()
        return folder

    def _make_buffers(self) -> list[HostBuffer]:
        """Raises UserError when this machine's memory is too small for its ranks' buffers."""
        nbytes = snapshot_bytes(
            self._engines.values(),
            self._world.rank,
            self._extra_tensors,
            include_untrained=self._settings.include_untrained,
        )
        count = self._settings.num_host_buffers if self._settings.async_save else 1
        needed = nbytes * count * self._world.local_size
        with agreed(self._world):
            require_memory(needed)
        pinned = self._stream is not None
        buffers = [HostBuffer(nbytes, pinned=pinned)]
        for _ in range(1, count):
            # Unpinned memory is taken only when a slow disk makes a further buffer necessary.
            # Pinning it then would take seconds.
            buffers.append(HostBuffer(nbytes if pinned else 0, pinned=pinned))
        return buffers

    def _make_manifest(
        self, step: int, metric: float | None, about: dict[str, Any], *, healthy: bool
    ) -> Manifest:
        return Manifest(
            step=step,
            attempt=self._attempt,
            world_size=self._world.size,
            zero_stage=zero_stage(self._engines[""]),
            config_hash=self._config_hash,
            created=time.time(),
            metric=metric,
            metric_name=self._settings.best_metric,
            healthy=healthy,
            about=about,
        )

    def _start_copy(self, save: Save, captured: CapturedState) -> None:
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._copying = save
        thread = threading.Thread(
            target=self._copy, args=(save, captured), name="checkpoint-copy", daemon=True
        )
        thread.start()

    def _copy(self, save: Save, captured: CapturedState) -> None:
        """Lay out the files and fill the host buffer, in a thread of its own."""
        began = time.perf_counter()
        try:
            save.plan = self._planner.plan(captured)
            fill(save.plan, self._buffers[save.buffer], save.progress, self._stream)
            self._metrics.set("copy_s", time.perf_counter() - began)
        except Exception as error:
            # The committer reports it, on every rank.
            save.progress.fail(f"the copy to host memory failed: {error}")
        finally:
            save.copied.set()

    def _wait_for_copy(self) -> None:
        save = self._copying
        self._copying = None
        if save is not None and not save.copied.wait(self._settings.timeout_s):
            raise RuntimeError(f"the copy of step {save.step} to host memory did not end")

    def _fetch_newer(self) -> None:
        with agreed(self._world):
            if self._world.is_main:
                self._folder.fetch_newer()

    def _load(self, folder: Path, manifest: Manifest) -> Restored | None:
        """Load a verified checkpoint; None when a rank can't read it: it is now ``.corrupt``.

        Raises UserError for a checkpoint of another model and for a file that may not be read,
        Failure for one that can't be read for another reason.
        """
        error: Exception | None = None
        unreadable: UserError | Failure | None = None
        try:
            restored = load_states(folder, manifest, self._world.rank, self._world.size)
            for name, ds in self._engines.items():
                reader = engine_reader(folder, manifest, name)
                load_engine(
                    ds,
                    reader,
                    include_untrained=self._settings.include_untrained,
                    model=f"{name or 'actor_rollout_ref'}.model",
                )
                if not name:
                    missing = load_extra_tensors(self._extra_tensors, reader)
        except (DamagedError, UserError) as caught:
            error = caught
        except OSError as caught:
            unreadable = unreadable_file(caught)
        elsewhere = Failure(f"another rank can't read {folder}; its log names the file")
        raise_on_all(self._world, unreadable, elsewhere=elsewhere)
        if not self._world.all(not isinstance(error, DamagedError)):
            # Its checksums hold and it still can't be read: a bug of the version that wrote it, as
            # final as a bit flip.
            reason = error or "another rank could not read it"
            log.error("checkpoint %s can't be restored: %s", folder, reason)
            with agreed(self._world):
                if self._world.is_main:
                    quarantine(self._folder.disk, folder)
            return None
        if error is not None:
            raise error
        for ds in self._engines.values():
            gather_persistent_parameters(ds)
        if missing:
            log.warning("%s lacks %s, which stay as they are", folder, ", ".join(missing[:3]))
        return restored

    def _after_restore(self, restored: Restored) -> None:
        self._metrics.set("last_committed_step", float(restored.step))
        if is_same_folder(restored.folder.parent, self._folder.root):
            self._committer.add_verified(restored.manifest)
        with agreed(self._world):
            if self._world.is_main:
                record_resume(
                    self._folder.disk,
                    self._folder.root,
                    self._settings,
                    restored.folder,
                    restored.step,
                )
        if restored.manifest.config_hash != self._config_hash:
            log.warning("%s was written under other settings than this attempt's", restored.folder)
