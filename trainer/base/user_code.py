"""A user's own Python file, named by a key of the config, and the modules beside it.

Modules beside the file load by their plain name, as in a script: ``import helper`` takes
``helper.py`` from the file's folder. One that Python would find elsewhere too is refused.
"""

from __future__ import annotations

import ast
import importlib.util
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

from trainer.base.errors import UserError, nearest
from trainer.base.home import expanded

MODULES_FOLDER = "modules"
"""Beside a frozen file: the modules that it imports."""
SOURCE_FILE = "source.txt"
"""Beside a frozen file: the path that it was copied from."""


def load_module(path: str | Path, *, key: str) -> tuple[ModuleType, Path]:
    """The module in the file ``path``, and the file. Its ``__file__`` is the file that the user
    named, also for a frozen copy: data beside that is found.

    Raises UserError, which names ``key``, when the file is missing or fails to load, or when a
    module beside it has the name of another one.
    """
    file = expanded(path)
    if not file.is_file():
        siblings = sorted(p.name for p in file.parent.glob("*.py")) if file.parent.is_dir() else []
        raise UserError(f"{key}: there is no file {file}{nearest(file.name, siblings)}")
    module_name = f"plimsoll_user_{file.stem}"
    spec = importlib.util.spec_from_file_location(module_name, file)
    if spec is None or spec.loader is None:
        raise UserError(f"{key}: {file} is not a Python file; its name must end in .py")
    source = _source_of(file)
    _find_modules_beside(file, source, key)
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(source)
    sys.modules[module_name] = module  # dataclasses and pickle look a module up by its name
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        raise UserError(f"{key}: {file}, line {error.lineno}: {error.msg}") from error
    except (Exception, SystemExit) as error:
        raise UserError(f"{key}: {file} doesn't load: {describe_exception(error)}") from error
    return module, file


def modules_beside(file: Path, *, key: str) -> dict[str, Path]:
    """The Python files beside ``file`` that it imports, and those that they import: name relative
    to the folder -> file. Of a package all its files.

    Raises UserError, which names ``key``, for a file that is no Python.
    """
    folders = list(dict.fromkeys([file.parent, file.resolve().parent]))
    found: dict[str, Path] = {}
    waiting = [file]
    while waiting:
        for name in _imported_names(waiting.pop(), key):
            for path, relative in _files_of_module(name, folders):
                if relative not in found and path != file:
                    found[relative] = path
                    waiting.append(path)
    return found


def _imported_names(file: Path, key: str) -> Iterator[str]:
    """First parts of the names of all modules that a file imports, inside functions too."""
    try:
        tree = ast.parse(file.read_bytes())
    except SyntaxError as error:
        raise UserError(f"{key}: {file}, line {error.lineno}: {error.msg}") from error
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{key}: {file} can't be read: {error}") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            yield node.module.split(".")[0]


def _files_of_module(name: str, folders: list[Path]) -> Iterator[tuple[Path, str]]:
    """The files of module ``name`` in the first of ``folders`` that has it."""
    for folder in folders:
        package = folder / name
        files = sorted(package.rglob("*.py")) if package.is_dir() else []
        if not files and (folder / f"{name}.py").is_file():
            files = [folder / f"{name}.py"]
        for path in files:
            yield path, str(path.relative_to(folder))
        if files:
            return


def _source_of(file: Path) -> Path:
    """The file that the user named, of which ``file`` may be the frozen copy."""
    marker = file.parent / SOURCE_FILE
    return Path(marker.read_text()) if marker.is_file() else file.absolute()


def _find_modules_beside(file: Path, source: Path, key: str) -> None:
    """Put the modules beside ``file`` on Python's path."""
    frozen = file.parent / MODULES_FOLDER
    if source == file.absolute():
        names = {Path(name).parts[0].removesuffix(".py") for name in modules_beside(file, key=key)}
        folder = file.absolute().parent
    else:
        names = {path.stem for path in frozen.iterdir()} if frozen.is_dir() else set()
        folder = frozen
    for name in sorted(names):
        _require_only_one(name, [folder, source.parent, source.resolve().parent], file, key)
    if not names or str(folder) in sys.path:
        return
    if folder == frozen:
        sys.path.insert(0, str(folder))  # holds nothing else: no other import can meet it
    else:
        sys.path.append(str(folder))


def _require_only_one(name: str, own: list[Path], file: Path, key: str) -> None:
    """Raises UserError when Python would find another module ``name``."""
    other: str | None = "the standard library"
    if name not in sys.stdlib_module_names:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            spec = None
        if spec is None:
            return
        places = [spec.origin] if spec.origin else list(spec.submodule_search_locations or ())
        other = next((p for p in places if not _lies_in(Path(p), own)), None)
    if other is not None and not _same_file(own[0] / f"{name}.py", Path(other)):
        raise UserError(
            f"{key}: {file.name} imports '{name}', which is a module beside it and one of {other}: "
            f"give {name}.py another name"
        )


def _lies_in(path: Path, folders: list[Path]) -> bool:
    return any(folder in path.parents or path == folder for folder in folders)


def _same_file(one: Path, other: Path) -> bool:
    try:
        return one.read_bytes() == other.read_bytes()
    except OSError:
        return False


def public_names(file: Path, *, classes: bool = False) -> list[str]:
    """The names of the public functions, or ``classes``, that ``file`` defines."""
    kind = ast.ClassDef if classes else ast.FunctionDef
    tree = ast.parse(file.read_text(encoding="utf-8"))
    names = [node.name for node in tree.body if isinstance(node, kind)]
    return [name for name in names if not name.startswith("_")]


def describe_exception(error: BaseException) -> str:
    """The last line of a traceback, and the file and line that raised it."""
    text = "".join(traceback.format_exception_only(error)).strip().splitlines()[-1]
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return text
    return f"{text} ({Path(frames[-1].filename).name}:{frames[-1].lineno})"
