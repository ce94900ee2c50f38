"""Which folders an image needs: those that the configs name, where their links lead, and caches.

An image sees bound folders only. A link in one of them that leads elsewhere (a data file, a model
in Hugging Face's cache) is a dangling one unless its target is bound as well.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from trainer.config.keys import dotted

CACHES = ("PLIMSOLL_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
"""Variables that name caches. An image has no home, so those not set point into the sweep's folder
``cache``.
"""
PARTS_OF_CACHES = (
    *("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "HF_DATASETS_CACHE", "HF_ASSETS_CACHE"),
    *("TRANSFORMERS_CACHE", "TORCH_HOME", "VLLM_CACHE_ROOT"),
)
"""Variables that name parts of them, bound where they are set."""
OF_THE_IMAGE = (
    "/usr",
    "/lib",
    "/lib32",
    "/lib64",
    "/bin",
    "/sbin",
    "/etc",
    "/dev",
    "/proc",
    "/sys",
)
"""Folders that an image has itself: of these single files are bound, never a folder."""
TOP = ("/", "/home", "/opt", "/root", "/run", "/var")
"""Folders that are bound in parts only."""
MAX_DEPTH = 4
MAX_ENTRIES = 50_000
"""How deep and how far a folder is searched for links."""
NO_BIND = frozenset(":,\n")
"""Characters that separate the parts of a bind."""


def binds_of(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Folders (and single files) of all paths in the configs that exist here, and of the targets of
    links in them; none inside another.
    """
    paths: set[Path] = set()
    texts: set[str] = set()
    for config in configs:
        texts |= set(_texts(config))
        paths |= set(_mirror_folder(config))
    for text in sorted(texts):
        paths |= set(_places(text))
    return outermost(paths)


def cache_binds(env: Mapping[str, str]) -> tuple[str, ...]:
    """Folders of the caches that ``env`` names, and of Hugging Face's where it is by default."""
    named = [env.get(name) for name in (*CACHES, *PARTS_OF_CACHES)]
    paths: set[Path] = set()
    for text in [*named, hf_home(env)]:
        if text and os.path.isdir(text) and not NO_BIND & set(text):
            paths |= set(_folder_and_links(Path(os.path.abspath(text))))
    return outermost(paths)


def hf_home(env: Mapping[str, str]) -> str | None:
    """Hugging Face's folder: HF_HOME, or where it is by default; None when there is none."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(env.get("HOME", "/nonexistent"), ".cache")
    folder = env.get("HF_HOME") or os.path.join(base, "huggingface")
    return os.path.abspath(folder) if os.path.isdir(folder) else None


def outermost(paths: Iterable[Path]) -> tuple[str, ...]:
    """``paths`` without those inside another."""
    kept: list[Path] = []
    for path in sorted(set(paths), key=lambda one: (len(one.parts), one)):
        if not any(path == outer or outer in path.parents for outer in kept):
            kept.append(path)
    return tuple(sorted(map(str, kept)))


def bind_problems(config: Mapping[str, Any]) -> list[str]:
    """A message for each path that can't be bound into an image."""
    return [
        f"{key}={text}: a path with ':' or ',' can't be bound into an image; give it another name."
        for key, text in _path_keys(config)
        if NO_BIND & set(text) and os.path.lexists(os.path.expanduser(text))
    ]


def _path_keys(config: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Key and text of all settings that name paths."""
    # pydantic, which a command that only looks at runs does without
    from trainer.config.keys.fields import marked
    from trainer.config.schema.markers import LocalPath, UserFile

    for kind in (LocalPath, UserFile):
        for key, _ in marked(kind):
            value = dotted.get(config, key)
            for text in value if isinstance(value, list | tuple) else [value]:
                if isinstance(text, str):
                    yield key, text


def _texts(config: Mapping[str, Any]) -> Iterator[str]:
    """Texts that may be paths: those of the keys that name paths, and all with a slash."""
    yield from (text for _, text in _path_keys(config))
    for text in _strings(config):
        if "/" in text.strip("/"):
            yield text


def _mirror_folder(config: Mapping[str, Any]) -> Iterator[Path]:
    """Where checkpoints are mirrored, if that is a folder; one that is yet to be made in the one
    that exists.
    """
    text = dotted.get(config, "trainer.default_hdfs_dir")
    if not isinstance(text, str) or "://" in text.removeprefix("file://"):
        return
    path = Path(os.path.abspath(text.removeprefix("file://")))
    while not path.exists():
        path = path.parent
    if not _belongs_to_image(path):
        yield from (path, path.resolve())


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in ("cluster", "container"):
                yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _places(text: str) -> Iterator[Path]:
    """What has to be bound for the path or glob ``text``; nothing when it is none."""
    if len(text) >= 4096 or NO_BIND & set(text) or "://" in text:
        return
    path = Path(os.path.abspath(os.path.expanduser(text)))
    if path.is_dir():
        yield from _folder_and_links(path)
    elif path.exists():
        yield from _file(path)
    elif glob.has_magic(text):
        for match in glob.glob(str(path), recursive=True):
            found = Path(match)
            yield from _folder_and_links(found) if found.is_dir() else _file(found)


def _folder_and_links(folder: Path) -> Iterator[Path]:
    """A folder, the one that it is a link to, and what links in it lead to."""
    if _belongs_to_image(folder):
        return
    real = folder.resolve()
    yield folder
    if not _belongs_to_image(real):
        yield real
    for link in _links_in(real):
        target = link.resolve()
        if not target.exists() or real in target.parents:
            continue
        if target.is_dir():
            if not _belongs_to_image(target):
                yield target
        else:
            yield from _file(target)


def _links_in(folder: Path) -> Iterator[Path]:
    seen = 0
    for root, folders, files in os.walk(folder):
        depth = len(Path(root).relative_to(folder).parts)
        for name in (*folders, *files):
            seen += 1
            path = Path(root, name)
            if path.is_symlink():
                yield path
        if depth >= MAX_DEPTH or seen > MAX_ENTRIES:
            folders.clear()


def _file(file: Path) -> Iterator[Path]:
    """The folders of a file and of what it is a link to; the file alone in a folder that can't be
    bound.
    """
    for path in (file, file.resolve()):
        yield path if _belongs_to_image(path.parent) else path.parent


def _belongs_to_image(folder: Path) -> bool:
    text = str(folder)
    return text in TOP or any(text == one or text.startswith(f"{one}/") for one in OF_THE_IMAGE)
