"""A second home of checkpoints at any fsspec URL (s3://, gs://, hdfs://, memory://): object stores
have no rename, so the files go up first and the manifest last; without a manifest that verifies a
folder there is no checkpoint.
"""

from __future__ import annotations

import logging
import re
import shutil
from pathlib import Path

import fsspec

from trainer.base.errors import UserError
from trainer.checkpoint.store import commit
from trainer.checkpoint.store import manifest as manifests
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.manifest import Damaged, Manifest

log = logging.getLogger(__name__)


class Mirror:
    """Checkpoints of one run below ``url`` (a slash at its end or not). Raises UserError for an
    unknown protocol, and when nothing can be written there: better now than after the first save.
    """

    def __init__(self, url: str) -> None:
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
                "the access, or set it "
                "to null"
            ) from error

    def upload(self, folder: Path, manifest: Manifest) -> None:
        """Copy a committed checkpoint, its manifest last. Raises OSError, and what the protocol's
        client raises.
        """
        there = f"{self._root}/{folder.name}"
        self._remove(folder.name)
        for name in manifest.files:
            self._put(folder / name, f"{there}/{name}")
        self._put(folder / manifests.NAME, f"{there}/{manifests.NAME}")

    def keep_only(self, steps: set[int]) -> None:
        """Remove others, and what interrupted uploads left."""
        for step, whole in self._found().items():
            if step not in steps or not whole:
                self._remove(f"step_{step}")

    def steps(self) -> list[int]:
        """Steps that have a manifest, newest first."""
        return sorted((step for step, whole in self._found().items() if whole), reverse=True)

    def _found(self) -> dict[int, bool]:
        """Step -> whether it has a manifest."""
        self._fs.invalidate_cache()
        if not self._fs.exists(self._root):
            return {}
        names = [
            str(path).rstrip("/").rsplit("/", 1)[-1]
            for path in self._fs.ls(self._root, detail=False)
        ]
        steps = [int(m[1]) for name in names if (m := re.fullmatch(r"step_(\d+)", name))]
        return {
            step: bool(self._fs.exists(f"{self._root}/step_{step}/{manifests.NAME}"))
            for step in steps
        }

    def _remove(self, name: str) -> None:
        """The manifest first: what is left of an interrupted removal is no checkpoint."""
        for path in (f"{self._root}/{name}/{manifests.NAME}", f"{self._root}/{name}"):
            if self._fs.exists(path):
                self._fs.rm(path, recursive=True)

    def download(self, step: int, root: Path, disk: Disk, fence: str) -> Path:
        """Fetch a checkpoint into ``root`` and commit it there. Raises Damaged when it isn't
        whole.
        """
        there, temp = f"{self._root}/step_{step}", root / f"step_{step}.tmp-{fence}"
        disk.rmtree(temp)
        temp.mkdir(mode=0o700, parents=True)
        try:
            self._get(f"{there}/{manifests.NAME}", temp / manifests.NAME)
            manifest = manifests.read(temp)
            for name in manifest.files:
                (temp / name).parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self._get(f"{there}/{name}", temp / name)
                disk.fsync(temp / name)
            if wrong := manifests.problems(temp, manifest):
                raise Damaged(f"{there}: {'; '.join(wrong)}")
            disk.fsync(temp / manifests.NAME)
            for folder in sorted(
                {p for n in manifest.files for p in (temp / n).parents if p.is_relative_to(temp)}
            ):
                disk.fsync_dir(folder)
            disk.rename(temp, root / f"step_{step}")
            disk.fsync_dir(root)
        except BaseException:
            shutil.rmtree(temp, ignore_errors=True)
            raise
        return root / f"step_{step}"

    def _put(self, source: Path, target: str) -> None:
        self._fs.makedirs(target.rsplit("/", 1)[0], exist_ok=True)
        self._fs.put_file(str(source), target)

    def _get(self, source: str, target: Path) -> None:
        try:
            self._fs.get_file(source, str(target))
        except FileNotFoundError as error:
            raise Damaged(f"{source} is missing") from error


def fetch_newer(mirror: Mirror, root: Path, disk: Disk, fence: str) -> Path | None:
    """The run folder is new or behind (another cluster, a lost disk): commit the mirror's newest
    whole one there, if it is newer than all that is there. Raises what the protocol's client
    raises.
    """
    have = commit.steps_on_disk(root)
    for step in mirror.steps():
        if step <= max(have, default=-1):
            break
        try:
            return mirror.download(step, root, disk, fence)
        except Damaged as error:
            log.error("step_%d of trainer.default_hdfs_dir is damaged: %s", step, error)
    return None
