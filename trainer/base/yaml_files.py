"""YAML files that others wrote, looked at before they are expanded."""

from __future__ import annotations

from pathlib import Path

import yaml

from trainer.base.errors import UserError
from trainer.base.json_files import read_regular

MOST_BYTES = 1 << 20
MOST_NODES = 100_000
"""More than any settings hold. Aliases (``*name``) that repeat each other are a few lines that
become billions of values.
"""


class TooManyValues(UserError):
    """A file whose aliases make more values of it than any settings have, or that holds itself."""


def require_readable(path: Path) -> None:
    """Raises UserError that names file and line unless ``path`` is a YAML file of sensible size,
    with its aliases written out.
    """
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise UserError(f"{path} has {size} bytes: it can't be a file of settings")
        text = read_regular(path, MOST_BYTES).decode()
        node = yaml.compose(text, Loader=yaml.SafeLoader)
    except OSError as error:
        raise UserError(f"{path} can't be read ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is no YAML: byte {error.start} is no UTF-8; save it in that encoding"
        ) from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path} is no YAML: {yaml_problem(error)}") from error
    if node is not None:
        _Counter(path).count(node)


def yaml_problem(error: Exception) -> str:
    """What is wrong in a YAML file, and in which line, on one line."""
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    mark = getattr(error, "problem_mark", None)
    if mark is None:
        return str(error).splitlines()[0]
    problem = getattr(error, "problem", None) or "it can't be read"
    hint = ""
    if "'\\t'" in problem:
        hint = "; indent with spaces, not with tabs"
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}{hint}"


class _Counter:
    """Counts the values of a file with its aliases written out."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._counts: dict[int, int] = {}
        self._open: set[int] = set()

    def count(self, node: yaml.Node) -> int:
        """Values in ``node``. Raises UserError for too many, and for a node that holds itself."""
        key = id(node)
        if key in self._counts:
            return self._counts[key]
        if key in self._open:
            raise TooManyValues(f"{self.path}, line {_line(node)}: a value holds itself (*alias)")
        self._open.add(key)
        total = 1
        for child in _children(node):
            total += self.count(child)
        self._open.discard(key)
        if total > MOST_NODES:
            raise TooManyValues(
                f"{self.path}, line {_line(node)}: more than {MOST_NODES} values once its aliases "
                "(*name) are written out; it can't be a file of settings"
            )
        self._counts[key] = total
        return total


def _children(node: yaml.Node) -> list[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        return [part for pair in node.value for part in pair]
    if isinstance(node, yaml.SequenceNode):
        return list(node.value)
    return []


def _line(node: yaml.Node) -> int:
    mark = node.start_mark
    return 0 if mark is None else int(mark.line) + 1
