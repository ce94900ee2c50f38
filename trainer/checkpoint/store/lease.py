"""One job per run folder: a lock that the kernel drops when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path

from trainer.base.errors import UserError
from trainer.base.json_files import parse_object
from trainer.base.processes import process_start
from trainer.base.run_owner import LEASE

log = logging.getLogger(__name__)
LINGER_S = 100.0
"""How long to wait for a lock that may outlive its holder: an NFSv4 server keeps the locks of a
vanished machine for 90 s.
"""
POLL_S = 0.1


class Lease:
    """The lock of a run folder, held by rank 0 from before it reads checkpoints until ``release``.

    A POSIX record lock: it works over NFS and Lustre, a forked child doesn't inherit it, and a dead
    job's lock doesn't block.
    """

    def __init__(self, run_dir: Path, attempt: int, *, linger_s: float = LINGER_S) -> None:
        """Raises UserError when another process holds the lock.

        At once when that process lives on this machine, else after ``linger_s`` seconds.
        """
        self._fd = os.open(run_dir / LEASE, os.O_RDWR | os.O_CREAT, 0o600)
        self._acquire(run_dir, linger_s)
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "attempt": attempt,
            "since": time.time(),
        }
        self._holder = json.dumps(holder).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._holder, 0)

    def is_held(self) -> bool:
        """False when a later job wrote itself in: only possible on a file system without locks."""
        return os.pread(self._fd, 4096, 0) == self._holder

    def release(self) -> None:
        """Drop the lock. Further calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _acquire(self, run_dir: Path, linger_s: float) -> None:
        deadline = time.monotonic() + linger_s
        warned = False
        while self._is_locked_by_another():
            holder = os.pread(self._fd, 4096, 0)
            if _is_alive_on_this_host(holder) or time.monotonic() > deadline:
                os.close(self._fd)
                raise UserError(
                    f"another job is running in {run_dir} ({_describe(holder)}); wait for it or "
                    "end it, or set another trainer.experiment_name or trainer.default_local_dir"
                )
            if not warned:
                log.warning(
                    "%s is locked (%s); waiting for %.0f s in case that is dead",
                    run_dir,
                    _describe(holder),
                    linger_s,
                )
                warned = True
            time.sleep(POLL_S)

    def _is_locked_by_another(self) -> bool:
        """Try to lock. A file system without locks counts as locked by this process."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in (errno.EACCES, errno.EAGAIN)
        return False


def _is_alive_on_this_host(holder: bytes) -> bool:
    """Whether the process that wrote ``holder`` runs on this machine and is not a zombie."""
    try:
        body = parse_object(holder) or {}
        if body["host"] != socket.gethostname():
            return False
        return process_start(int(body["pid"])) > 0
    except (ValueError, KeyError, TypeError, OverflowError):
        return False


def _describe(holder: bytes) -> str:
    try:
        body = parse_object(holder) or {}
        job = f", Slurm job {body['job']}" if body.get("job") else ""
        return f"process {body['pid']} on {body['host']}{job}"
    except (ValueError, KeyError, TypeError):
        return "its holder is unknown"
