"""What a power cut may leave on a POSIX file system: contents and names become durable by fsync
alone; what is not yet durable may have happened or not, each file and each name by itself, in any
combination.

Names are entries of folders (name -> inode); a rename within a folder is one change, so it happens
whole or not at all.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.checkpoint.shims import Op

FILE_STATES = ("none", "half", "all")
EXHAUSTIVE = 10
"""Up to so many undecided things all combinations are tried; beyond that the extremes and a random
part.
"""


@dataclass
class Inode:
    folder: bool
    durable: bytes = b""
    data: bytes = b""
    entries: dict[str, Inode] = field(default_factory=dict)
    """A folder's names as the running system sees them."""
    saved: dict[str, Inode] = field(default_factory=dict)
    """Those on the disk for sure."""
    pending: list[tuple[tuple[str, Inode | None], ...]] = field(default_factory=list)
    """Changes since: each a set of (name, inode or None) that happens whole or not at all."""

    __hash__ = object.__hash__
    __eq__ = object.__eq__


class Machine:
    """Replays a trace below ``root``."""

    def __init__(self, root: Path) -> None:
        self.root, self.top = root, Inode(folder=True)

    def run(self, op: Op) -> None:
        if op.kind == "fsync":
            node = self._find(op.path)
            node.durable = node.data
        elif op.kind == "fsync_dir":
            node = self._find(op.path)
            node.saved, node.pending = dict(node.entries), []
        elif op.kind == "mkdir":
            self._change(op.path.parent, (op.path.name, Inode(folder=True)))
        elif op.kind == "write":
            known = self._find(op.path.parent).entries.get(op.path.name)
            if known is None:
                known = Inode(folder=False)
                self._change(op.path.parent, (op.path.name, known))
            known.durable, known.data = (known.durable if not known.data else b""), op.data
        elif op.kind == "unlink":
            self._change(op.path.parent, (op.path.name, None))
        elif op.kind == "rename":
            assert op.other is not None and op.other.parent == op.path.parent, (
                "only within a folder"
            )
            node = self._find(op.path)
            self._change(op.path.parent, (op.path.name, None), (op.other.name, node))

    def outcomes(self, chance: random.Random, limit: int) -> Iterator[dict[str, bytes | None]]:
        """Trees (relative path -> contents, None for a folder) that a power cut now may leave."""
        nodes = list(self._reachable())
        changes = [(node, number) for node in nodes for number in range(len(node.pending))]
        files = [node for node in nodes if not node.folder and node.durable != node.data]
        axes: list[Sequence[object]] = [(False, True)] * len(changes) + [FILE_STATES] * len(files)
        for choice in _choices(axes, chance, limit):
            happened = dict(zip(changes, choice, strict=False))
            contents = dict(zip(files, choice[len(changes) :], strict=True))
            tree: dict[str, bytes | None] = {}
            self._lay(self.top, "", happened, contents, tree)
            yield tree

    def _lay(
        self, node: Inode, at: str, happened: dict, contents: dict, tree: dict[str, bytes | None]
    ) -> None:  # type: ignore[type-arg]
        entries = dict(node.saved)
        for number, change in enumerate(node.pending):
            if happened.get((node, number)):
                for name, target in change:
                    entries.pop(name, None) if target is None else entries.__setitem__(name, target)
        for name, child in entries.items():
            path = f"{at}/{name}" if at else name
            if child.folder:
                tree[path] = None
                self._lay(child, path, happened, contents, tree)
            else:
                state = contents.get(child, "all")
                tree[path] = {
                    "none": child.durable,
                    "half": child.data[: len(child.data) // 2],
                    "all": child.data,
                }[state]

    def _reachable(self) -> Iterator[Inode]:
        seen: set[int] = set()
        stack = [self.top]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            if node.folder:
                stack += node.saved.values()
                stack += [
                    target for change in node.pending for _, target in change if target is not None
                ]

    def _find(self, path: Path) -> Inode:
        node = self.top
        for part in path.relative_to(self.root).parts:
            node = node.entries[part]
        return node

    def _change(self, folder: Path, *change: tuple[str, Inode | None]) -> None:
        node = self._find(folder)
        for name, target in change:
            if target is None:
                node.entries.pop(name, None)
            else:
                node.entries[name] = target
        node.pending.append(change)


def _choices(
    axes: list[Sequence[object]], chance: random.Random, limit: int
) -> Iterator[tuple[object, ...]]:
    total = 1
    for axis in axes:
        total *= len(axis)
    if total <= limit:
        yield from itertools.product(*axes)
        return
    yield tuple(axis[0] for axis in axes)
    yield tuple(axis[-1] for axis in axes)
    for lone in range(len(axes)):
        yield tuple(axis[0 if i == lone else -1] for i, axis in enumerate(axes))
        yield tuple(axis[-1 if i == lone else 0] for i, axis in enumerate(axes))
    for _ in range(limit):
        yield tuple(chance.choice(axis) for axis in axes)
