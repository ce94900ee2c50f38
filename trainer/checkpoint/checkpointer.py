"""The checkpoint room's door: snapshot at a step boundary, write and commit in the background, restore at start."""

from __future__ import annotations

import contextlib
import logging
import queue
import secrets
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from trainer.checkpoint import commit, policy
from trainer.checkpoint import manifest as manifests
from trainer.checkpoint.buffers import HostBuffer, require_memory
from trainer.checkpoint.commit import FOLDER, temp_dir
from trainer.checkpoint.disk import load_disk
from trainer.checkpoint.finding import find, note_resumed_from, same_folder, was_resumed_from
from trainer.checkpoint.fragments import fragments, zero_stage
from trainer.checkpoint.lease import Lease
from trainer.checkpoint.manifest import Damaged, Manifest
from trainer.checkpoint.meeting import Meeting, OutOfTime
from trainer.checkpoint.mirror import Mirror, newest_elsewhere
from trainer.checkpoint.restore import Restored, Saved, load_engine, load_states
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.snapshot import Copy, Plan, make_plan, put_large, put_small
from trainer.checkpoint.writing import WriteFailed, WriterClient
from trainer.errors import UserError

log = logging.getLogger(__name__)


@dataclass
class Save:
    """One checkpoint on its way from the engine to the disk."""

    step: int
    plan: Plan
    slot: int
    metric: float | None
    about: dict[str, Any]
    copied: threading.Event = field(default_factory=threading.Event)
    done: threading.Event = field(default_factory=threading.Event)
    committed: bool = False


class Checkpointer:
    """Every rank makes one; ``save`` and ``restore`` are collective, the rest is not. Raises UserError when the run
    folder can't be written, another job holds it, or host memory is too small for the snapshots.
    """

    def __init__(
        self, run_dir: Path, ds_engine: Any, settings: CheckpointSettings, *, rank: int, world_size: int, attempt: int,
        config_hash: str, local_world_size: int = 1, group: dist.ProcessGroup | None = None,
    ) -> None:  # fmt: skip
        self.run_dir, self.root = run_dir, run_dir / FOLDER
        self._ds, self._settings, self._rank, self._size = ds_engine, settings, rank, world_size
        self._attempt, self._config_hash, self._group = attempt, config_hash, group
        self._disk = load_disk(settings.disk)
        self._lease: Lease | None = None
        self._mirror: Mirror | None = None
        self._agree(self._prepare)
        self._fence = f"{attempt}-{self._told(secrets.token_hex(3))}"
        nbytes = self._share_bytes()
        generations = settings.generations if settings.async_save else 1
        self._agree(lambda: require_memory(nbytes * generations * local_world_size))
        pinned = ds_engine.device.type == "cuda"
        self._stream = torch.cuda.Stream() if pinned else None  # type: ignore[no-untyped-call]
        self._buffers = [HostBuffer(nbytes, pinned=pinned) for _ in range(generations)]
        self._writer = WriterClient([b.fd for b in self._buffers], settings.disk)
        self._meeting = Meeting(rank, world_size, timeout_s=settings.timeout_s)
        self._queue: queue.Queue[Save | None] = queue.Queue()
        self._copying: Save | None = None
        self._free = set(range(generations))
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._numbers: dict[str, float] = {"failures": 0.0, "stall_s": 0.0, "last_committed_step": -1.0}
        self._errors: list[str] = []
        self._begun = time.time()
        self._last_commit = self._begun
        self._metrics_of: dict[int, float | None] = {}
        self._thread = threading.Thread(target=self._commit_all, name="checkpoint-commit", daemon=True)
        self._thread.start()

    def save(
        self, step: int, rank_state: dict[str, Any], global_state: dict[str, Any], metric: float | None = None,
        *, blocking: bool = False, about: dict[str, Any] | None = None,
    ) -> bool:  # fmt: skip
        """Checkpoint the state after ``step``. Collective.

        Not blocking: returns once the background copy has begun; call ``before_step`` before the weights change. False:
        not begun, since both host buffers are still in use (a slow disk): ask again after the next step. Blocking:
        waits for the commit, True when it came about. Disk errors never raise: they are in ``metrics`` and in the log.
        """
        blocking = blocking or not self._settings.async_save
        began = time.perf_counter()
        self.before_step()
        if blocking:
            self._wait_until_idle(self._settings.timeout_s)
        if not self._all(bool(self._free)):
            self._count("skipped")
            return False
        plan = make_plan(self._ds, step, self._rank, rank_state, global_state)
        with self._lock:
            slot = self._free.pop()
        buffer = self._buffers[slot]
        buffer.grow(plan.size)
        save = Save(step, plan, slot, metric, about or {})
        large = put_small(plan, buffer)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        self._copying = save
        threading.Thread(target=self._copy, args=(save, large), name="checkpoint-copy", daemon=True).start()
        self._queue.put(save)
        if blocking:
            self.before_step()
            save.done.wait(self._settings.timeout_s * 2 + 60)
        self._numbers["stall_s"] += time.perf_counter() - began
        return save.committed if blocking else True

    def before_step(self) -> None:
        """Wait for what is left of the copy. Call it before anything changes weights or optimizer."""
        save, self._copying = self._copying, None
        if save is not None:
            began = time.perf_counter()
            if not save.copied.wait(self._settings.timeout_s):
                raise RuntimeError(f"the copy of step {save.step} to host memory did not end")
            self._numbers["stall_s"] += time.perf_counter() - began

    def restore(self) -> Restored | None:
        """Fill the engine from the newest whole checkpoint, the same on all ranks; None: the run begins. Collective.

        A damaged one is renamed ``.corrupt``, and the one before it is taken. Raises UserError when there is none
        though the run has had one, for another model, and for a newer format.
        """
        if self._settings.resume_mode == "auto":
            self._agree(self._fetch, only_main=True)
        while True:
            found = find(self._disk, self.run_dir, self._settings, self._rank, self._size, self._group)
            if found is None:
                return None
            folder, manifest = found
            try:
                saved = Saved(folder, manifest)
                restored = load_states(folder, manifest, self._rank, self._size)
                load_engine(self._ds, saved)
                error = None
            except (Damaged, UserError) as caught:
                error = caught
            except OSError as caught:
                error = Damaged(f"{folder.name}: {caught}")
            if not self._all(not isinstance(error, Damaged)):
                # Its checksums hold and it still can't be read: a writer's fault, as final as a bit flip.
                log.error("checkpoint %s can't be restored: %s", folder, error or "another rank could not read it")
                self._agree(lambda path=folder: commit.quarantine(self._disk, path) and None, only_main=True)
                continue
            if error is not None:
                raise error
            self._numbers["last_committed_step"] = float(manifest.step)
            self._agree(lambda path=folder, step=manifest.step: self._leave(path, step), only_main=True)
            if manifest.config_hash != self._config_hash:
                log.warning("%s was written under other settings than this attempt's", folder)
            return restored

    def metrics(self) -> dict[str, float]:
        """``ckpt/*`` since the start; ``stall_s`` since the last call. Logs what went wrong since then."""
        with self._lock:
            errors, self._errors = self._errors, []
            numbers = dict(self._numbers)
            self._numbers["stall_s"] = 0.0
            numbers["in_flight"] = float(len(self._buffers) - len(self._free))
        numbers["age_s"] = time.time() - self._last_commit
        for error in errors:
            log.error("%s", error)
        return {f"ckpt/{name}": value for name, value in numbers.items()}

    def wait(self, timeout_s: float) -> bool:
        """Wait until everything begun is committed or has failed. False: out of time."""
        self.before_step()
        return self._wait_until_idle(timeout_s)

    def close(self, timeout_s: float = 60.0) -> None:
        """Let the save in flight end, at most ``timeout_s``; then stop the writer and give the lease back."""
        with contextlib.suppress(RuntimeError):
            self.before_step()
        self._queue.put(None)
        self._thread.join(timeout_s)
        self._closing.set()
        self._thread.join(10.0)
        self._writer.stop()
        if not self._thread.is_alive():
            for buffer in self._buffers:
                buffer.close()
        self.metrics()
        if self._lease is not None:
            self._lease.release()

    def _prepare(self) -> None:
        if self._rank:
            return
        try:
            self._mirror = None if self._settings.mirror is None else Mirror(self._settings.mirror)
            self._disk.makedirs(self.root)
            self._lease = Lease(self.run_dir, self._attempt)
            for name in commit.clean(self._disk, self.root):
                log.info("removed %s, left by an interrupted save", name)
        except OSError as error:
            raise UserError(
                f"the run folder {self.run_dir} can't hold checkpoints ({error.strerror or error}); set "
                "trainer.default_local_dir to a folder of yours with free space"
            ) from error

    def _fetch(self) -> None:
        """The run folder is new or behind (another cluster, a lost disk): take the mirror's newest whole one."""
        if self._mirror is None:
            return
        for step in newest_elsewhere(self._mirror, commit.steps_on_disk(self.root)):
            try:
                self._mirror.download(step, self.root, self._disk, self._fence)
                return
            except Damaged as error:
                log.error("step_%d of trainer.default_hdfs_dir is damaged: %s", step, error)
            except Exception as error:  # each protocol's client has errors of its own
                raise UserError(
                    f"trainer.default_hdfs_dir={self._settings.mirror} can't be read ({error}); mend the access, or "
                    "set it to null"
                ) from error

    def _leave(self, folder: Path, step: int) -> None:
        """The run goes on from ``folder``: checkpoints of the future it leaves are set aside, and the choice is noted,
        so that the next attempt of the same command goes on from its own newest one.
        """
        path = self._settings.resume_from_path
        if self._settings.resume_mode != "path" or path is None or was_resumed_from(self.root, path):
            return
        for name in commit.set_aside(self._disk, self.root, step if same_folder(folder.parent, self.root) else -1):
            log.warning("the run goes on from %s; its own newer checkpoint is kept as %s", folder, name)
        note_resumed_from(self._disk, self.root, path)

    def _share_bytes(self) -> int:
        """Size of this rank's files once the optimizer has its moments."""
        found = fragments(self._ds)
        masters = sum(f.numel for f in found if f.kind == "fp32")
        weights = sum(f.numel * f.tensor.element_size() for f in found if f.kind == "weight")
        if zero_stage(self._ds) == 0 and not masters:
            return weights * 3 if self._rank == 0 else 0
        return masters * 12 + (weights if self._rank == 0 and zero_stage(self._ds) < 3 else 0)

    def _copy(self, save: Save, large: list[Copy]) -> None:
        began = time.perf_counter()
        try:
            put_large(large, self._buffers[save.slot], self._stream)
            self._numbers["copy_s"] = time.perf_counter() - began
        except Exception as error:
            save.plan.files.clear()
            self._fail(f"checkpoint of step {save.step}: the copy to host memory failed: {error}")
        finally:
            save.copied.set()

    def _commit_all(self) -> None:
        while (save := self._queue.get()) is not None:
            try:
                save.committed = self._commit(save)
            except Exception as error:
                self._fail(f"checkpoint of step {save.step} failed: {type(error).__name__}: {error}")
            finally:
                with self._lock:
                    self._free.add(save.slot)
                save.done.set()

    def _commit(self, save: Save) -> bool:
        """Write this rank's files, meet the others, and on rank 0 publish. False: failed and told."""
        name, temp = f"{save.step}", temp_dir(self.root, save.step, self._fence)
        save.copied.wait()
        began = time.perf_counter()
        try:
            if not save.plan.files:
                raise WriteFailed("nothing was copied")
            records = self._writer.write(
                temp, save.plan.files, buffer=save.slot, size=save.plan.size, timeout_s=self._settings.timeout_s,
                cancelled=self._closing.is_set,
            )  # fmt: skip
            message: dict[str, Any] = {"records": records}
        except WriteFailed as error:
            message = {"error": f"rank {self._rank}: {error}"}
        if self._rank == 0:
            outcome = self._publish(save, message)
            self._meeting.tell(f"outcome/{name}", outcome)
            self._meeting.part(name, ("written", "outcome"))
        else:
            try:
                self._meeting.tell(f"written/{name}", message)
                outcome = self._meeting.hear(f"outcome/{name}", 0, self._closing.is_set)
                self._meeting.tell(f"heard/{name}", True)
            except OutOfTime as error:
                outcome = {"error": str(error)}
        if "error" in outcome:
            self._fail(f"checkpoint of step {save.step} failed: {outcome['error']}; the one before it is intact")
            return False
        seconds = time.perf_counter() - began
        with self._lock:
            self._last_commit = time.time()
            self._numbers |= {
                "write_s": seconds, "bytes": float(save.plan.size), "last_committed_step": float(save.step),
                "write_gbps": save.plan.size / seconds / 1e9,
            }  # fmt: skip
        return True

    def _publish(self, save: Save, own: dict[str, Any]) -> dict[str, Any]:
        temp = temp_dir(self.root, save.step, self._fence)
        try:
            messages = [own] + [
                self._meeting.hear(f"written/{save.step}", rank, self._closing.is_set) for rank in range(1, self._size)
            ]
            errors = [m["error"] for m in messages if "error" in m]
            if errors:
                raise WriteFailed("; ".join(errors))
            if self._lease is not None and not self._lease.still_mine():
                raise WriteFailed("a later job has taken this run folder")
            manifest = Manifest(
                step=save.step, attempt=self._attempt, world_size=self._size, zero_stage=zero_stage(self._ds),
                config_hash=self._config_hash, created=time.time(), metric=save.metric, about=save.about,
                files={name: record for m in messages for name, record in m["records"].items()},
            )  # fmt: skip
            commit.publish(self._disk, self.root, manifest, self._fence)
        except (OSError, WriteFailed, OutOfTime) as error:
            with contextlib.suppress(OSError):
                self._disk.rmtree(temp)
            return {"error": str(error)}
        # From here on the checkpoint is committed; what fails below is told, and mended by the next save.
        try:
            commit.point_latest(self._disk, self.root, save.step, self._fence)
            kept = self._retain()
            if self._mirror is not None:
                self._mirror.upload(commit.step_dir(self.root, save.step), manifest)
                self._mirror.keep_only(kept)
        except Exception as error:  # also what a mirror's client raises
            self._fail(f"after the commit of step {save.step}: {type(error).__name__}: {error}")
        return {"step": save.step}

    def _retain(self) -> set[int]:
        steps = commit.steps_on_disk(self.root)
        for step in steps:
            if step not in self._metrics_of:
                with contextlib.suppress(Damaged, UserError):
                    self._metrics_of[step] = manifests.read(commit.step_dir(self.root, step)).metric
        keep = policy.kept(
            steps, keep_last=self._settings.keep_last, keep_every=self._settings.keep_every,
            keep_best=self._settings.keep_best, metrics=self._metrics_of, best=self._settings.best,
        )  # fmt: skip
        commit.remove(self._disk, self.root, sorted(set(steps) - keep))
        return keep

    def _wait_until_idle(self, timeout_s: float) -> bool:
        until = time.monotonic() + timeout_s
        while len(self._free) < len(self._buffers):
            if time.monotonic() > until or not self._thread.is_alive():
                return False
            time.sleep(0.005)
        return True

    def _fail(self, message: str) -> None:
        with self._lock:
            self._errors.append(message)
            self._numbers["failures"] += 1
        log.error("%s", message)

    def _count(self, name: str) -> None:
        with self._lock:
            self._numbers[name] = self._numbers.get(name, 0.0) + 1

    def _told(self, word: str) -> str:
        box = [word]
        if self._size > 1:
            dist.broadcast_object_list(box, src=0, group=self._group, device=torch.device("cpu"))
        return box[0]

    def _all(self, flag: bool) -> bool:
        if self._size == 1:
            return flag
        tensor = torch.tensor(int(flag))
        dist.all_reduce(tensor, op=dist.ReduceOp.MIN, group=self._group)
        return bool(tensor)

    def _agree(self, action: Any, *, only_main: bool = False) -> None:
        """Run ``action`` everywhere (or on rank 0); when it is a UserError anywhere, it is one everywhere."""
        error: UserError | None = None
        try:
            if self._rank == 0 or not only_main:
                action()
        except UserError as caught:
            error = caught
        if not self._all(error is None):
            raise error or UserError("another rank refused to go on; its message says why")
