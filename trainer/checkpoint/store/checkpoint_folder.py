"""The folder of a run's checkpoints, opened for one attempt: its disk, lease, fence and mirror."""

from __future__ import annotations

import errno
import logging
import os
from pathlib import Path

from trainer.base.errors import UserError
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store.cleanup import remove_leftovers
from trainer.checkpoint.store.disk import load_disk
from trainer.checkpoint.store.layout import FOLDER
from trainer.checkpoint.store.lease import Lease
from trainer.checkpoint.store.mirror import Mirror, fetch_newer

log = logging.getLogger(__name__)


class CheckpointFolder:
    """Every rank has one; only rank 0 opens it, and so only it has a lease and a mirror."""

    def __init__(
        self, run_dir: Path, settings: CheckpointSettings, *, attempt: int, fence: str
    ) -> None:
        self.run_dir = run_dir
        self.root = run_dir / FOLDER
        self.disk = load_disk(settings.disk)
        self.fence = fence
        """Part of the names of this attempt's temporary files, the same on every rank."""
        self.mirror: Mirror | None = None
        self._mirror_url = settings.mirror
        self._attempt = attempt
        self._lease: Lease | None = None

    def open(self) -> None:
        """Take the run's lease and remove the leftovers of interrupted saves.

        Raises UserError when the folder or the mirror can't be written, or another job holds the
        lease.
        """
        try:
            if self._mirror_url is not None:
                self.mirror = Mirror(self._mirror_url)
            self.disk.makedirs(self.root)
            # Noticed only at the first save, it would cost all steps before that.
            if not os.access(self.root, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            self._lease = Lease(self.run_dir, self._attempt)
            for name in remove_leftovers(self.disk, self.root):
                log.info("removed %s, left by an interrupted save", name)
        except OSError as error:
            raise UserError(
                f"the run folder {self.run_dir} can't hold checkpoints "
                f"({error.strerror or error}); set trainer.default_local_dir to a folder of yours "
                "with free space"
            ) from error

    @property
    def is_taken_over(self) -> bool:
        """Whether a later job has taken this run folder (on a file system without locks)."""
        return self._lease is not None and not self._lease.is_held()

    def fetch_newer(self) -> None:
        """Fetch the mirror's newest checkpoint when it is newer than all in the folder.

        Raises UserError when the mirror can't be read.
        """
        if self.mirror is None:
            return
        try:
            fetch_newer(self.mirror, self.root, self.disk, self.fence)
        except Exception as error:  # each protocol's client has errors of its own
            raise UserError(
                f"trainer.default_hdfs_dir={self._mirror_url} can't be read ({error}); mend the "
                "access, or set it to null"
            ) from error

    def close(self) -> None:
        """Release the lease."""
        if self._lease is not None:
            self._lease.release()
