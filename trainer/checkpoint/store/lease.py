"""One job per run folder. The lease is a lock that the kernel drops when its process ends, however
it ends.
"""

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

log = logging.getLogger(__name__)
NAME = "lease.json"
LINGER_S = 100.0
"""An NFSv4 server keeps a vanished machine's locks for 90 s; a killed process keeps its own for an
instant.
"""
POLL_S = 0.1


class Lease:
    """Held by rank 0 from before the first look at the checkpoints until ``release``.

    A POSIX record lock: it works over NFS and Lustre, a forked child doesn't inherit it, a dead
    job's doesn't block. Raises UserError when another process holds it: at once when that lives on
    this machine, else after ``linger_s``, which a lock may outlive its process or its machine.
    ``enforced`` is False on a file system without locks.
    """

    def __init__(self, run_dir: Path, attempt: int, *, linger_s: float = LINGER_S) -> None:
        self.path = run_dir / NAME
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
        until, told = time.monotonic() + linger_s, False
        while (state := self._try()) is None:
            holder = os.pread(self._fd, 4096, 0)
            if _lives_here(holder) or time.monotonic() > until:
                os.close(self._fd)
                raise UserError(
                    f"another job is running in {run_dir} ({_words(holder)}); wait for it or end "
                    "it, or set another "
                    "trainer.experiment_name or trainer.default_local_dir"
                )
            if not told:
                log.warning(
                    "%s is locked (%s); waiting for %.0f s in case that is dead",
                    run_dir,
                    _words(holder),
                    linger_s,
                )
                told = True
            time.sleep(POLL_S)
        self.enforced = state
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

    def _try(self) -> bool | None:
        """True: locked; None: another holds it; False: there are no locks here."""
        try:
            fcntl.lockf(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return None if error.errno in (errno.EACCES, errno.EAGAIN) else False
        return True

    def still_mine(self) -> bool:
        """False when a later job wrote itself in: only possible where locks are not enforced."""
        return os.pread(self._fd, 4096, 0) == self._body

    def release(self) -> None:
        """Let the next job in. Further calls do nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def _lives_here(holder: bytes) -> bool:
    """Whether the process that wrote ``holder`` is of this machine and not about to vanish."""
    try:
        body = json.loads(holder)
        if body["host"] != socket.gethostname():
            return False
        state = Path(f"/proc/{int(body['pid'])}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except (OSError, ValueError, KeyError, TypeError, IndexError):
        return False
    return state not in "ZX"


def _words(holder: bytes) -> str:
    try:
        body = json.loads(holder)
        job = f", Slurm job {body['job']}" if body.get("job") else ""
        return f"process {body['pid']} on {body['host']}{job}"
    except (ValueError, KeyError, TypeError):
        return "its holder is unknown"
