"""One job per run folder. The lease is a lock that the kernel drops when its process ends, however it ends."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path

from trainer.errors import UserError

NAME = "lease.json"


class Lease:
    """Held by rank 0 from before the first look at the checkpoints until ``release``.

    A POSIX record lock: it works over NFS and Lustre, a forked child doesn't inherit it, a dead job's doesn't block.
    Raises UserError when another live process holds it. ``enforced`` is False on a file system without locks.
    """

    def __init__(self, run_dir: Path, attempt: int) -> None:
        self.path = run_dir / NAME
        self.enforced = True
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(self._fd, 4096).decode(errors="replace")
            if error.errno in (errno.EACCES, errno.EAGAIN):
                os.close(self._fd)
                raise UserError(
                    f"another job is running in {run_dir} ({_words(holder)}); wait for it or end it, or set another "
                    "trainer.experiment_name or trainer.default_local_dir"
                ) from None
            self.enforced = False
        body = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID"),
            "attempt": attempt,
            "since": time.time(),
        }
        self._body = json.dumps(body).encode()
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, self._body, 0)

    def still_mine(self) -> bool:
        """False when a later job wrote itself in: only possible where locks are not enforced."""
        return os.pread(self._fd, 4096, 0) == self._body

    def release(self) -> None:
        """Let the next job in. Further calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _words(holder: str) -> str:
    try:
        body = json.loads(holder)
        job = f", Slurm job {body['job']}" if body.get("job") else ""
        return f"process {body['pid']} on {body['host']}{job}"
    except (ValueError, KeyError, TypeError):
        return "its holder is unknown"
