"""Which functions and classes of the project a command can reach, by name.

A name counts as used wherever it stands in code that is itself reached: as a name, an attribute, or
a word of a text (``python -m`` and plugins name modules and functions so). That takes some for
reached that are not; what it finds unreached is so.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

FOLDERS = ("trainer", "jobs", "hydra_plugins")
_WORD = re.compile(r"[A-Za-z_]\w*")
_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


@dataclass(frozen=True)
class Definition:
    """A function or class at the top of a file."""

    file: str
    name: str
    uses: frozenset[str] = field(hash=False)


def unreached(root: Path, folders: Iterable[str]) -> list[str]:
    """``FILE: NAME`` of every top-level function and class below ``folders`` of ``root`` that no
    code reaches which runs when a file is imported or started.
    """
    definitions: dict[str, list[Definition]] = {}
    waiting: set[str] = set()
    for path in sorted(p for folder in folders for p in (root / folder).rglob("*.py")):
        at_import, defined = _parts(path.relative_to(root).as_posix(), path.read_text())
        waiting |= at_import
        for one in defined:
            definitions.setdefault(one.name, []).append(one)
    reached: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in definitions and name not in reached:
            reached.add(name)
            for one in definitions[name]:
                waiting |= one.uses
    return sorted(
        f"{one.file}: {name}"
        for name, several in definitions.items()
        if name not in reached
        for one in several
    )


def _parts(file: str, text: str) -> tuple[set[str], list[Definition]]:
    """The names that importing or starting ``file`` uses, and its definitions."""
    at_import: set[str] = set()
    defined: list[Definition] = []
    for node in ast.parse(text).body:
        if isinstance(node, _DEFINITIONS):
            defined.append(Definition(file, node.name, frozenset(_names(node))))
            for decorator in node.decorator_list:
                if not _only_describes(decorator):
                    at_import.add(node.name)  # a decorator may register it
        elif not _only_passes_on(node):
            at_import |= set(_names(node))
    return at_import, defined


def _only_passes_on(node: ast.stmt) -> bool:
    """An import, ``__all__``, or a docstring: no use by itself."""
    if isinstance(node, ast.Import | ast.ImportFrom):
        return True
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return True
    targets = node.targets if isinstance(node, ast.Assign) else []
    return any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets)


def _only_describes(decorator: ast.expr) -> bool:
    """Decorators of the standard library and torch, which call nothing later."""
    words = set(_names(decorator))
    return bool(words & {"dataclass", "contextmanager", "lru_cache", "cache", "no_grad", "njit"})


def _names(node: ast.AST) -> Iterator[str]:
    """Names, attributes and words of texts below ``node``; docstrings are none."""
    docstrings = {
        id(inner.body[0].value)
        for inner in ast.walk(node)
        if isinstance(inner, _DEFINITIONS)
        and isinstance(inner.body[0], ast.Expr)
        and isinstance(inner.body[0].value, ast.Constant)
    }
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name):
            yield inner.id
        elif isinstance(inner, ast.Attribute):
            yield inner.attr
        elif isinstance(inner, ast.Constant) and id(inner) not in docstrings:
            yield from _WORD.findall(inner.value if isinstance(inner.value, str) else "")


if __name__ == "__main__":
    print("\n".join(unreached(Path(__file__).resolve().parents[1], FOLDERS)))
