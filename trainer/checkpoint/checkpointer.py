"""The checkpoint room's door: snapshot at a step boundary, write and commit in the background,
restore at start.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import secrets
import threading
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.base.errors import UserError
from trainer.checkpoint.committer import Committer, Save
from trainer.checkpoint.metrics import Numbers
from trainer.checkpoint.restore import (
    Restored,
    Saved,
    load_beside,
    load_engine,
    load_states,
    settle,
)
from trainer.checkpoint.resume import find, note_resumed_from, same_folder, was_resumed_from
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot.fragments import fragments, zero_stage
from trainer.checkpoint.snapshot.host_buffer import HostBuffer, require_memory
from trainer.checkpoint.snapshot.planner import Captured, Plan, Planner, fill
from trainer.checkpoint.store import commit
from trainer.checkpoint.store.commit import FOLDER
from trainer.checkpoint.store.commit_store import Meeting
from trainer.checkpoint.store.disk import load_disk
from trainer.checkpoint.store.lease import Lease
from trainer.checkpoint.store.manifest import Damaged, Manifest
from trainer.checkpoint.store.mirror import Mirror, fetch_newer
from trainer.checkpoint.writer.client import WriterClient
from trainer.ranks.small_exchanges import Ranks

log = logging.getLogger(__name__)


class Checkpointer:
    """Every rank makes one; ``save`` and ``restore`` are collective, the rest is not. Raises
    UserError when the run folder can't be written, another job holds it, or host memory is too
    small for the snapshots.
    """

    def __init__(
        self,
        run_dir: Path,
        ds_engine: Any,
        settings: CheckpointSettings,
        *,
        rank: int,
        world_size: int,
        attempt: int,
        config_hash: str,
        local_world_size: int = 1,
        group: dist.ProcessGroup | None = None,
        beside: Mapping[str, torch.Tensor] | None = None,
    ) -> None:
        """``beside``: tensors that are not the engine's, the same on every rank: rank 0 saves them,
        ``restore`` fills them. They change only after a ``before_step``.
        """
        self.run_dir, self.root = run_dir, run_dir / FOLDER
        self._ds, self._settings = ds_engine, settings
        self._attempt, self._config_hash = attempt, config_hash
        self._beside = dict(beside or {})
        self._ranks = Ranks(rank, world_size, group)
        self._numbers = Numbers()
        self._disk = load_disk(settings.disk)
        self._lease: Lease | None = None
        self._mirror: Mirror | None = None
        self._ranks.agree(self._prepare, only_main=True)
        self._fence = f"{attempt}-{self._ranks.told(secrets.token_hex(3))}"
        nbytes = self._share_bytes()
        slots = settings.generations if settings.async_save else 1
        self._ranks.agree(lambda: require_memory(nbytes * slots * local_world_size))
        pinned = ds_engine.device.type == "cuda"
        self._stream = torch.cuda.Stream() if pinned else None  # type: ignore[no-untyped-call]
        # Beyond the first, memory is taken when a slow disk makes it needed (pinning it then would
        # take seconds).
        self._buffers = [
            HostBuffer(0 if slot and not pinned else nbytes, pinned=pinned) for slot in range(slots)
        ]
        self._writer = WriterClient([b.fd for b in self._buffers], settings.disk)
        self._planner = Planner(ds_engine, rank, self._beside, frozen=settings.frozen)
        self._copying: Save | None = None
        self._committer = Committer(
            self.root,
            settings,
            self._disk,
            writer=self._writer,
            numbers=self._numbers,
            fence=self._fence,
            meeting=Meeting(rank, world_size, timeout_s=settings.timeout_s),
            slots=slots,
            lease=self._lease,
            mirror=self._mirror,
        )

    def save(
        self,
        step: int,
        rank_state: dict[str, Any],
        global_state: dict[str, Any],
        metric: float | None = None,
        *,
        blocking: bool = False,
        about: dict[str, Any] | None = None,
    ) -> bool:
        """Checkpoint the state after ``step``. Collective.

        Not blocking: returns once the background copy has begun; call ``before_step`` before the
        weights change. False: not begun, since both host buffers are still in use (a slow disk):
        ask again after the next step. Blocking: waits for the commit, True when it came about. Disk
        errors never raise: they are in ``metrics`` and in the log.
        """
        blocking = blocking or not self._settings.async_save
        began = time.perf_counter()
        self._wait_for_copy()
        if blocking:
            self._committer.wait_until_idle(self._settings.timeout_s)
        if not self._ranks.all(self._committer.has_room):
            self._numbers.add("skipped")
            self._committer.pace.hurry()
            return False
        captured = self._planner.capture(step, rank_state, global_state)
        manifest = Manifest(
            step=step,
            attempt=self._attempt,
            world_size=self._ranks.size,
            zero_stage=zero_stage(self._ds),
            config_hash=self._config_hash,
            created=time.time(),
            metric=metric,
            metric_name=self._settings.best_metric,
            about=about or {},
        )
        save = Save(Plan(), self._committer.take_slot(), manifest)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._copying = save
        threading.Thread(
            target=self._copy, args=(save, captured), name="checkpoint-copy", daemon=True
        ).start()
        self._committer.put(save)
        if blocking:
            self._committer.pace.hurry()
            self._wait_for_copy()
            save.done.wait(self._settings.timeout_s * 2 + 60)
        self._numbers.add("stall_s", time.perf_counter() - began)
        return save.committed if blocking else True

    def before_step(self) -> None:
        """Wait for what is left of the copy. Call it before anything changes weights or
        optimizer.
        """
        began = time.perf_counter()
        self._wait_for_copy()
        self._numbers.add("stall_s", time.perf_counter() - began)

    def restore(self) -> Restored | None:
        """Fill the engine from the newest whole checkpoint, the same on all ranks; None: the run
        begins. Collective.

        A damaged one is renamed ``.corrupt``, and the one before it, or a newer one of the mirror,
        is taken. Raises UserError when there is none though the run has had one, for another model,
        and for a newer format.
        """
        if self._settings.resume_mode == "auto":
            self._fetch()
        while True:
            found = find(self._disk, self.run_dir, self._settings, self._ranks, self._fetch)
            if found is None:
                return None
            folder, manifest = found
            try:
                saved = Saved(folder, manifest)
                restored = load_states(folder, manifest, self._ranks.rank, self._ranks.size)
                load_engine(self._ds, saved, frozen=self._settings.frozen)
                missing = load_beside(self._beside, saved)
                error = None
            except (Damaged, UserError) as caught:
                error = caught
            except OSError as caught:
                error = Damaged(f"{folder.name}: {caught}")
            if not self._ranks.all(not isinstance(error, Damaged)):
                # Its checksums hold and it still can't be read: a writer's fault, as final as a bit
                # flip.
                log.error(
                    "checkpoint %s can't be restored: %s",
                    folder,
                    error or "another rank could not read it",
                )
                self._ranks.agree(partial(commit.quarantine, self._disk, folder), only_main=True)
                continue
            if error is not None:
                raise error
            settle(self._ds)
            if missing:
                log.warning("%s lacks %s, which stay as they are", folder, ", ".join(missing[:3]))
            self._numbers.put(last_committed_step=float(manifest.step))
            self._ranks.agree(partial(self._leave, folder, manifest.step), only_main=True)
            if manifest.config_hash != self._config_hash:
                log.warning("%s was written under other settings than this attempt's", folder)
            return restored

    def metrics(self) -> dict[str, float]:
        """``ckpt/*`` since the start; ``stall_s`` since the last call."""
        return self._numbers.take(self._committer.in_flight)

    @property
    def last_committed_step(self) -> int | None:
        """Step of the newest checkpoint that this attempt committed or began from."""
        step = self._numbers.get("last_committed_step")
        return None if step is None or step < 0 else int(step)

    @property
    def save_s(self) -> float | None:
        """Seconds that the last save took from its copy to its commit; None before the first."""
        return self._numbers.get("write_s")

    @property
    def last_failure(self) -> str:
        """What the last failed save said; empty before the first."""
        return self._numbers.last_failure

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything begun is committed or has failed. False: out of time."""
        self.before_step()
        return self._committer.wait_until_idle(timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Let the save in flight end, at most ``timeout_s``; then stop the writer and give the
        lease back.
        """
        with contextlib.suppress(RuntimeError):
            self.before_step()
        ended = self._committer.close(timeout_s)
        self._writer.stop()
        if ended:
            for buffer in self._buffers:
                buffer.close()
        if self._lease is not None:
            self._lease.release()

    def _wait_for_copy(self) -> None:
        save, self._copying = self._copying, None
        if save is not None and not save.copied.wait(self._settings.timeout_s):
            raise RuntimeError(f"the copy of step {save.step} to host memory did not end")

    def _prepare(self) -> None:
        try:
            self._mirror = None if self._settings.mirror is None else Mirror(self._settings.mirror)
            self._disk.makedirs(self.root)
            if not os.access(
                self.root, os.W_OK | os.X_OK
            ):  # found out at the first save, it would cost all before
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._lease = Lease(self.run_dir, self._attempt)
            for name in commit.clean(self._disk, self.root):
                log.info("removed %s, left by an interrupted save", name)
        except OSError as error:
            raise UserError(
                f"the run folder {self.run_dir} can't hold checkpoints "
                f"({error.strerror or error}); set "
                "trainer.default_local_dir to a folder of yours with free space"
            ) from error

    def _fetch(self) -> None:
        self._ranks.agree(self._fetch_newer, only_main=True)

    def _fetch_newer(self) -> None:
        if self._mirror is None:
            return
        try:
            fetch_newer(self._mirror, self.root, self._disk, self._fence)
        except Exception as error:  # each protocol's client has errors of its own
            raise UserError(
                f"trainer.default_hdfs_dir={self._settings.mirror} can't be read ({error}); mend "
                "the access, or set it "
                "to null"
            ) from error

    def _leave(self, folder: Path, step: int) -> None:
        """The run goes on from ``folder``: checkpoints of the future it leaves are set aside, and
        the choice is noted, so that the next attempt of the same command goes on from its own
        newest one.
        """
        path = self._settings.resume_from_path
        elsewhere = self._settings.resume_mode == "path" and self._settings.going_on
        if not elsewhere or path is None or was_resumed_from(self.root, path):
            return
        for name in commit.set_aside(
            self._disk, self.root, step if same_folder(folder.parent, self.root) else -1
        ):
            log.warning(
                "the run goes on from %s; its own newer checkpoint is kept as %s", folder, name
            )
        note_resumed_from(self._disk, self.root, path)

    def _share_bytes(self) -> int:
        """Size of this rank's files once the optimizer has its moments."""
        found = fragments(self._ds, frozen=self._settings.frozen)
        more = (
            sum(t.numel() * t.element_size() for t in self._beside.values())
            if self._ranks.rank == 0
            else 0
        )
        masters = sum(f.numel for f in found if f.kind == "fp32")
        weights = sum(f.numel * f.tensor.element_size() for f in found if f.kind == "weight")
        if zero_stage(self._ds) == 0 and not masters:
            return weights * 3 + more if self._ranks.rank == 0 else 0
        return (
            masters * 12
            + more
            + (weights if self._ranks.rank == 0 and zero_stage(self._ds) < 3 else 0)
        )

    def _copy(self, save: Save, captured: Captured) -> None:
        began = time.perf_counter()
        try:
            save.plan = self._planner.plan(captured)
            fill(save.plan, self._buffers[save.slot], save.filled, self._stream)
            self._numbers.put(copy_s=time.perf_counter() - began)
        except Exception as error:
            save.filled.fail()
            self._numbers.fail(
                f"checkpoint of step {save.step}: the copy to host memory failed: {error}"
            )
        finally:
            save.copied.set()
