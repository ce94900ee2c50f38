"""A second copy of the checkpoints at any fsspec URL (s3://, gs://, hdfs://, memory://).

Object stores have no rename, so the files are uploaded first and the manifest last: a folder there
is a checkpoint only with a manifest that verifies.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import fsspec

from trainer.base.errors import UserError
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.commit import sync_folders
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.layout import step_dir, steps_on_disk, temp_dir
from trainer.checkpoint.store.manifest import DamagedError, Manifest

log = logging.getLogger(__name__)


class Mirror:
    """Checkpoints of one run below a URL."""

    def __init__(self, url: str) -> None:
        """Tries to write to ``url`` at once, rather than fail after the first save.

        Raises UserError for an unknown protocol, and when nothing can be written there.
        """
        try:
            self._fs, root = fsspec.core.url_to_fs(url.rstrip("/"))
        except (ValueError, ImportError) as error:
            raise UserError(f"trainer.default_hdfs_dir={url}: {error}") from error
        self._root = str(root).rstrip("/")
        probe = f"{self._root}/.probe"
        try:
            self._fs.makedirs(self._root, exist_ok=True)
            self._fs.pipe_file(probe, b"")
            self._fs.rm_file(probe)
        except Exception as error:  # each protocol's client has errors of its own
            raise UserError(
                f"trainer.default_hdfs_dir={url} can't be written ({error}); mend the address or "
                "the access, or set it to null"
            ) from error

    def upload(self, folder: Path, manifest: Manifest) -> None:
        """Copy a committed checkpoint, its manifest last.

        Raises OSError and the errors of the protocol's client.
        """
        target = f"{self._root}/{folder.name}"
        self._remove(folder.name)
        for name in manifest.files:
            self._put(folder / name, f"{target}/{name}")
        self._put(folder / manifests.NAME, f"{target}/{manifests.NAME}")

    def keep_only(self, steps: set[int]) -> None:
        """Remove all other checkpoints, and what interrupted uploads left."""
        for step, has_manifest in self._folders().items():
            if step not in steps or not has_manifest:
                self._remove(f"step_{step}")

    def steps(self) -> list[int]:
        """Steps with a manifest, newest first."""
        steps = [step for step, has_manifest in self._folders().items() if has_manifest]
        return sorted(steps, reverse=True)

    def download(self, step: int, root: Path, disk: Disk, fence: str) -> Path:
        """Fetch a checkpoint into ``root`` and commit it there. Returns its folder.

        Raises DamagedError when it isn't whole.
        """
        source = f"{self._root}/step_{step}"
        temp = temp_dir(root, step, fence)
        disk.rmtree(temp)
        temp.mkdir(mode=0o700, parents=True)
        try:
            self._get(f"{source}/{manifests.NAME}", temp / manifests.NAME)
            manifest = manifests.read(temp)
            if manifest.step != step:
                raise DamagedError(f"{source} holds step {manifest.step}")
            for name in manifest.files:
                (temp / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._get(f"{source}/{name}", temp / name)
                disk.fsync(temp / name)
            problems = manifests.problems(temp, manifest)
            if problems:
                raise DamagedError(f"{source}: {'; '.join(problems)}")
            disk.fsync(temp / manifests.NAME)
            sync_folders(disk, temp, manifest)
            disk.rename(temp, step_dir(root, step))
            disk.fsync_dir(root)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return step_dir(root, step)

    def _folders(self) -> dict[int, bool]:
        """Step of each folder -> whether it has a manifest."""
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return {}
        folders = {}
        for path in self._fs.ls(self._root, detail=False):
            match = re.fullmatch(r"step_(\d+)", str(path).rstrip("/").rsplit("/", 1)[-1])
            if match is not None:
                manifest = f"{self._root}/{match[0]}/{manifests.NAME}"
                folders[int(match[1])] = bool(self._fs.exists(manifest))
        return folders

    def _remove(self, name: str) -> None:
        """Remove a folder, its manifest first: an interrupted removal leaves no checkpoint."""
        for path in (f"{self._root}/{name}/{manifests.NAME}", f"{self._root}/{name}"):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def _put(self, source: Path, target: str) -> None:
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(source), target)

    def _get(self, source: str, target: Path) -> None:
        try:
            self._fs.get_file(source, str(target))
        except FileNotFoundError as error:
            raise DamagedError(f"{source} is missing") from error


def fetch_newer(mirror: Mirror, root: Path, disk: Disk, fence: str) -> Path | None:
    """Fetch the mirror's newest whole checkpoint when it is newer than all in ``root``.

    So a run folder that is new (another cluster, a lost disk) or behind resumes from the mirror.
    Returns the folder, or None when nothing was fetched. Raises the errors of the protocol's
    client.
    """
    newest_here = max(steps_on_disk(root), default=-1)
    for step in mirror.steps():
        if step <= newest_here:
            break
        try:
            return mirror.download(step, root, disk, fence)
        except DamagedError as error:
            log.error("step_%d of trainer.default_hdfs_dir is damaged: %s", step, error)
    return None
