"""Small JSON files that a crash, a full disk or another program may have damaged. Every reader of
such a file is here: what can't be used is left out and told once, and never raises.

Standard library only: the batch script outside the image reads them too.
"""

from __future__ import annotations

import errno
import json
import math
import os
import stat
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

MAX_FILE_BYTES = 16 << 20
"""Most bytes of a file that is read whole; a longer one is no such file."""
MAX_LINE_BYTES = 16 << 20
"""Most bytes of a line; a longer one is left out without being held in memory."""
_CHUNK_BYTES = 1 << 16

Check = Callable[[Any], bool]
Fields = Mapping[str, Check]
"""Field -> whether its value can be used. Other fields may hold anything."""

_reported: set[str] = set()


def is_text(value: Any) -> bool:
    """A text that can be printed and be part of a path: no NUL, no half of a surrogate pair."""
    if not isinstance(value, str) or "\0" in value:
        return False
    return not any("\ud800" <= letter <= "\udfff" for letter in value)


def is_path(value: Any) -> bool:
    """A path that the system can look up."""
    if not is_text(value) or not value:
        return False
    data = os.fsencode(value)
    return len(data) < 4096 and all(len(part) < 256 for part in data.split(b"/"))


def is_number(value: Any) -> bool:
    """A finite number that a float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:
        return False


def is_count(value: Any) -> bool:
    """A whole number from 0 on, of a size that a counter can reach."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def is_texts(value: Any) -> bool:
    """A list of texts."""
    return isinstance(value, list | tuple) and all(is_text(item) for item in value)


def is_budgets(value: Any) -> bool:
    """An object whose values are whole numbers, or None for no bound."""
    return isinstance(value, dict) and all(
        item is None or is_count(item) for item in value.values()
    )


def optional(check: Check) -> Check:
    """``check``, or None."""
    return lambda value: value is None or check(value)


def parse_object(data: bytes | str) -> dict[str, Any] | None:
    """The JSON object in ``data``; None for anything else, such as a line that was cut short."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_bytes(path: Path, limit: int = MAX_FILE_BYTES) -> bytes | None:
    """The contents of a regular file; None when there is none, it can't be read or is longer.

    A pipe or a device is not waited for.
    """
    try:
        with open_regular(path) as file:
            data = file.read(limit + 1)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        return None
    return None if len(data) > limit else data


def read_regular(path: Path, limit: int = MAX_FILE_BYTES) -> bytes:
    """The contents of a file that a user named. Raises OSError for one that is no regular file, or
    is longer than ``limit`` bytes: a pipe would never be read, and a device never end.
    """
    with open_regular(path) as file:
        data = file.read(limit + 1)
    if len(data) > limit:
        raise OSError(errno.EFBIG, f"it has more than {limit} bytes", str(path))
    return data


def read_word(path: Path) -> str | None:
    """The text of a file of one short line, as a hint or a name; None when it holds none."""
    data = read_bytes(path, 1 << 16)
    if data is None:
        return None
    try:
        text = data.decode().strip()
    except UnicodeDecodeError:
        report(path, "is no text")
        return None
    return text if is_text(text) else None


def read_object(path: Path, fields: Fields | None = None) -> dict[str, Any]:
    """The object in ``path`` without the fields whose values can't be used; empty when there is
    none.
    """
    data = read_bytes(path)
    if data is None:
        if _exists(path):
            report(path, "can't be read as a record")
        return {}
    value = parse_object(data)
    if value is None:
        report(path, "is no whole JSON object")
        return {}
    wrong = _wrong_fields(value, fields or {})
    if wrong:
        report(path, f"holds no usable {', '.join(wrong)}")
    return {key: item for key, item in value.items() if key not in wrong}


def read_lines(
    path: Path, fields: Fields | None = None, required: tuple[str, ...] = ()
) -> list[dict[str, Any]]:
    """The objects of all whole lines of a JSON-lines file; empty when there is none.

    A line is left out when it is no object, lacks a ``required`` field, or one of its ``fields``
    can't be used.
    """
    objects: list[dict[str, Any]] = []
    for number, (line, is_whole) in enumerate(split_lines(path), start=1):
        value = None if len(line) > MAX_LINE_BYTES else parse_object(line)
        if value is None or any(name not in value for name in required):
            if is_whole and line.strip():
                report(path, f"has lines that are no records, the first is line {number}")
        elif _wrong_fields(value, fields or {}):
            wrong = ", ".join(_wrong_fields(value, fields or {}))
            report(path, f"has lines that can't be used, the first is line {number} ({wrong})")
        else:
            objects.append(value)
    return objects


def split_lines(path: Path, start: int = 0) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file from byte ``start`` on, without their ends, and whether they have one:
    the last may lack it, when its writer is at work or was killed.

    Of a line above ``MAX_LINE_BYTES`` one byte more than those. None when the file can't be read.
    """
    try:
        file = open_regular(path)
        file.seek(start)
    except (OSError, ValueError):  # ValueError: a NUL in the path
        if _exists(path):
            report(path, "can't be read as records")
        return
    rest = b""
    with file:
        while True:
            try:
                chunk = file.read(_CHUNK_BYTES)
            except OSError:
                break
            if not chunk:
                break
            *lines, last = chunk.split(b"\n")
            for line in lines:
                yield rest + line, True
                rest = b""
            rest = (rest + last)[: MAX_LINE_BYTES + 1]
    if rest:
        yield rest, False


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file for reading. Raises OSError for anything else."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    mode = os.fstat(descriptor).st_mode
    if not stat.S_ISREG(mode):
        os.close(descriptor)
        number = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
        raise OSError(number, os.strerror(number), str(path))
    return os.fdopen(descriptor, "rb")


def report(path: Path, problem: str) -> None:
    """Say once in this process that a file, or a part of it, is left out."""
    if str(path) in _reported:
        return
    _reported.add(str(path))
    text = f"[WARNING] {path} {problem}: that is left out.\n"
    sys.stderr.write(text.encode("utf-8", "backslashreplace").decode())


def _wrong_fields(value: Mapping[str, Any], fields: Fields) -> list[str]:
    return [name for name, check in fields.items() if name in value and not check(value[name])]


def _exists(path: Path) -> bool:
    try:
        return os.path.lexists(path)
    except ValueError:
        return False
