"""The cache of built-in models: many processes at once, models that were damaged, caches that can't
be written.
"""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from trainer.base.errors import UserError
from trainer.models import cache, load_model, make_builtin
from trainer.models.cache import NEEDED, cached

RANKS = 4
CACHES = 5
TIMEOUT_S = 300


def run_processes(count: int, target: Callable[..., None], *args: Any) -> None:
    """Run ``target(rank, *args)`` in ``count`` processes; each has to end well."""
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=target, args=(rank, *args)) for rank in range(count)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(timeout=TIMEOUT_S)
    assert [process.exitcode for process in processes] == [0] * count


def _rank(rank: int, root: Path, barrier: Any) -> None:
    """As a run begins: make the model, join the group, load."""
    torch.set_num_threads(1)
    for k in range(CACHES):
        os.environ["PLIMSOLL_CACHE"] = str(root / f"cache{k}")
        barrier.wait(timeout=TIMEOUT_S)
        make_builtin("builtin:tiny")
        store = dist.FileStore(str(root / f"store{k}"), RANKS)
        dist.init_process_group(
            "gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=TIMEOUT_S)
        )
        loaded = load_model("builtin:tiny", dtype=torch.float32, device="cpu")
        assert len(loaded.tokenizer) == loaded.shape.vocab
        dist.destroy_process_group()


def test_ranks_that_start_with_an_empty_cache_make_one_model(tmp_path: Path) -> None:
    barrier = multiprocessing.get_context("fork").Barrier(RANKS)
    run_processes(RANKS, _rank, tmp_path, barrier)
    for k in range(CACHES):
        (made,) = [p for p in (tmp_path / f"cache{k}").iterdir() if not p.name.endswith(".lock")]
        assert cache.damage(made) is None
        assert made.stat().st_mode & 0o077 == 0


def write_model(folder: Path, text: str = "x") -> None:
    for name in NEEDED:
        (folder / name).write_text(text * 9)


def _without_locks(rank: int, root: Path, barrier: Any, damaged: bool) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    fcntl.flock = refuse  # type: ignore[assignment]

    def build(folder: Path) -> None:
        write_model(folder, str(rank))
        barrier.wait(timeout=TIMEOUT_S)

    folder = cached(root, "race", "recipe", build)
    assert cache.damage(folder) is None
    barrier.wait(timeout=TIMEOUT_S)
    # What one process uses is what all use, and it is there to stay.
    assert cached(root, "race", "recipe", build) == folder
    assert (folder.name[-2:] == ".1") == damaged


@pytest.mark.parametrize("damaged", [False, True])
def test_the_first_rename_decides_where_locks_do_not_work(tmp_path: Path, damaged: bool) -> None:
    if damaged:
        folder = cached(tmp_path, "race", "recipe", write_model)
        (folder / NEEDED[0]).unlink()
    barrier = multiprocessing.get_context("fork").Barrier(RANKS)
    run_processes(RANKS, _without_locks, tmp_path, barrier, damaged)
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".race-")] == [
        p.name for p in tmp_path.iterdir() if p.suffix == ".lock"
    ]


def empty(folder: Path) -> None:
    for file in folder.iterdir():
        file.unlink()


def cut(folder: Path) -> None:
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])


def flip(folder: Path) -> None:
    weights = folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)


def lose(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def replace_by_file(folder: Path) -> None:
    empty(folder)
    folder.rmdir()
    folder.write_text("")


BREAK: dict[str, Callable[[Path], None]] = {
    "empty folder": empty,
    "cut file": cut,
    "one bit": flip,
    "no tokenizer": lose("tokenizer.json"),
    "no config": lose("config.json"),
    "no list of files": lose(cache.FILES),
    "list of files is no list": lambda folder: (folder / cache.FILES).write_text("[]"),
    "list of files is cut": lambda folder: (folder / cache.FILES).write_text('{"config.json": ['),
    "no folder": replace_by_file,
}


@pytest.mark.parametrize("kind", BREAK)
def test_a_damaged_model_is_made_anew(kind: str, tmp_path: Path) -> None:
    first = cached(tmp_path, "x", "recipe", lambda folder: write_model(folder, "a" * 9999))
    BREAK[kind](first)
    second = cached(tmp_path, "x", "recipe", write_model)
    assert cache.damage(second) is None
    assert (second / "model.safetensors").read_text() == "x" * 9
    # It stays what it is, and the damaged one keeps no room.
    assert cached(tmp_path, "x", "recipe", empty) == second
    if second != first and first.is_dir():
        assert {f.name for f in first.iterdir()} <= {cache.DAMAGED}
    BREAK["cut file"](second)
    assert cached(tmp_path, "x", "recipe", write_model) not in (first, second)


def test_a_failed_build_leaves_nothing(tmp_path: Path) -> None:
    def build(folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(
        UserError, match=r"cannot make builtin:x in the cache .*: No space left on device"
    ):
        cached(tmp_path, "x", "recipe", build)
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_what_killed_processes_left_is_deleted_in_time(tmp_path: Path) -> None:
    old, young = tmp_path / ".x-old", tmp_path / ".x-young"
    for folder in (old, young):
        folder.mkdir()
        (folder / "half").write_text("x")
    os.utime(old, (1e9, 1e9))
    cached(tmp_path, "x", "recipe", write_model)
    assert young.exists() and not old.exists()


def test_an_incomplete_model_is_never_given_its_name(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"tokenizer\.json is missing"):
        cached(tmp_path, "x", "recipe", lambda f: (write_model(f), (f / "tokenizer.json").unlink()))
    assert [p.suffix for p in tmp_path.iterdir()] == [".lock"]


def test_a_model_is_not_made_inside_a_process_group(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(RuntimeError, match="before there is a process group"):
            cached(tmp_path, "x", "recipe", write_model)
    finally:
        dist.destroy_process_group()


def test_a_full_disk_names_the_cache_and_what_to_set(tmp_path: Path) -> None:
    def full(folder: Path) -> None:
        raise RuntimeError("Error while serializing: I/O error: No space left (os error 28)")

    with pytest.raises(UserError, match="free space there, or set PLIMSOLL_CACHE") as error:
        cached(tmp_path / "cache", "tiny", "recipe", full)
    assert str(tmp_path / "cache") in str(error.value)
    assert "default_local_dir" not in str(error.value)
