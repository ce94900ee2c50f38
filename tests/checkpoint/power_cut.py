"""What a power cut may leave on a POSIX file system.

Contents and names become durable by fsync alone. What isn't yet durable may have happened or not,
each file and each name by itself, in any combination. Names are entries of folders (name -> inode);
a rename within a folder is one change, so it happens whole or not at all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.disks import Operation

FILE_STATES = ("none", "half", "all")
Tree = dict[str, bytes | None]
"""Relative path -> contents, None for a folder."""


@dataclass
class Inode:
    is_folder: bool
    durable: bytes = b""
    data: bytes = b""
    entries: dict[str, Inode] = field(default_factory=dict)
    """Names in a folder as the running system sees them."""
    durable_entries: dict[str, Inode] = field(default_factory=dict)
    pending: list[tuple[tuple[str, Inode | None], ...]] = field(default_factory=list)
    """Changes since: each a set of (name, inode or None) that happens whole or not at all."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__

    def contents(self, state: str) -> bytes:
        """The bytes of a file after a power cut that left it in one of ``FILE_STATES``."""
        if state == "none":
            return self.durable
        return self.data if state == "all" else self.data[: len(self.data) // 2]


class FileSystemModel:
    """Replays recorded operations below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.top = Inode(is_folder=True)

    def run(self, operation: Operation) -> None:
        path = operation.path
        if operation.kind == "fsync":
            node = self._find(path)
            node.durable = node.data
        elif operation.kind == "fsync_dir":
            node = self._find(path)
            node.durable_entries = dict(node.entries)
            node.pending = []
        elif operation.kind == "mkdir":
            self._change(path.parent, (path.name, Inode(is_folder=True)))
        elif operation.kind == "write":
            self._write(path, operation.data)
        elif operation.kind == "unlink":
            self._change(path.parent, (path.name, None))
        elif operation.kind == "rename":
            target = operation.other
            assert target is not None and target.parent == path.parent, "only within a folder"
            self._change(path.parent, (path.name, None), (target.name, self._find(path)))

    def outcomes(self, chance: random.Random, limit: int) -> Iterator[Tree]:
        """Trees that a power cut now may leave: all, or a random part of about ``limit``."""
        nodes = list(self._reachable())
        changes = [(node, number) for node in nodes for number in range(len(node.pending))]
        files = [node for node in nodes if not node.is_folder and node.durable != node.data]
        axes: list[Sequence[object]] = [(False, True)] * len(changes) + [FILE_STATES] * len(files)
        for choice in _choices(axes, chance, limit):
            happened = dict(zip(changes, choice, strict=False))
            states = dict(zip(files, choice[len(changes) :], strict=True))
            tree: Tree = {}
            _add_to_tree(tree, self.top, "", happened, states)
            yield tree

    def _write(self, path: Path, data: bytes) -> None:
        node = self._find(path.parent).entries.get(path.name)
        if node is None:
            node = Inode(is_folder=False)
            self._change(path.parent, (path.name, node))
        if node.data:
            node.durable = b""
        node.data = data

    def _reachable(self) -> Iterator[Inode]:
        """The inodes that a power cut may leave under some name."""
        seen: set[int] = set()
        stack = [self.top]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            stack += node.durable_entries.values()
            for change in node.pending:
                stack += [target for _, target in change if target is not None]

    def _find(self, path: Path) -> Inode:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def _change(self, folder: Path, *change: tuple[str, Inode | None]) -> None:
        node = self._find(folder)
        _apply(node.entries, change)
        node.pending.append(change)


def _apply(entries: dict[str, Inode], change: tuple[tuple[str, Inode | None], ...]) -> None:
    for name, target in change:
        if target is None:
            entries.pop(name, None)
        else:
            entries[name] = target


def _add_to_tree(
    tree: Tree,
    folder: Inode,
    path: str,
    happened: Mapping[tuple[Inode, int], object],
    states: Mapping[Inode, object],
) -> None:
    """Add the entries of ``folder`` given which changes happened and each file's state."""
    entries = dict(folder.durable_entries)
    for number, change in enumerate(folder.pending):
        if happened.get((folder, number)):
            _apply(entries, change)
    for name, child in entries.items():
        child_path = f"{path}/{name}" if path else name
        if child.is_folder:
            tree[child_path] = None
            _add_to_tree(tree, child, child_path, happened, states)
        else:
            tree[child_path] = child.contents(str(states.get(child, "all")))


def _choices(
    axes: list[Sequence[object]], chance: random.Random, limit: int
) -> Iterator[tuple[object, ...]]:
    """All combinations up to ``limit``; beyond that the extremes and a random part."""
    total = 1
    for axis in axes:
        total *= len(axis)
    if total <= limit:
        yield from itertools.product(*axes)
        return
    yield tuple(axis[0] for axis in axes)
    yield tuple(axis[-1] for axis in axes)
    for exception in range(len(axes)):
        yield tuple(axis[0 if i == exception else -1] for i, axis in enumerate(axes))
        yield tuple(axis[-1 if i == exception else 0] for i, axis in enumerate(axes))
    for _ in range(limit):
        yield tuple(chance.choice(axis) for axis in axes)
