"""Checksums per chunk: damage is located, ranks share the reading, and format 1 is still read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from xxhash import xxh3_128_hexdigest

from trainer.checkpoint.store import file_writing, manifest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.manifest import Manifest

BIG = b"0123456789" * 10
SMALL = b"abc"


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Manifest:
    monkeypatch.setattr(file_writing, "CHECKSUM_BYTES", 32)
    monkeypatch.setattr(file_writing, "CHUNK_BYTES", 8)
    files = {}
    for name, data in (("big", BIG), ("empty", b""), ("small", SMALL)):
        files[name] = [len(data), Disk().write(tmp_path / name, memoryview(data))]
    return Manifest(
        step=1,
        attempt=1,
        world_size=1,
        zero_stage=1,
        config_hash="",
        created=0.0,
        files=files,
        chunk_bytes=32,
    )


def test_damage_is_located_by_the_chunk(made: Manifest, tmp_path: Path) -> None:
    assert [len(digests) for _, digests in made.files.values()] == [4, 0, 1]
    assert manifest.problems(tmp_path, made) == []
    (tmp_path / "big").write_bytes(BIG[:99] + b"!")
    assert manifest.problems(tmp_path, made) == [
        "big doesn't match its checksum in bytes 96 to 100"
    ]


def test_each_chunk_is_read_by_one_rank(made: Manifest, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(bytes(100))
    (tmp_path / "small").write_bytes(b"abd")
    shares = [manifest.problems(tmp_path, made, (rank, 2)) for rank in (0, 1)]
    assert sorted(map(len, shares)) == [2, 3]
    assert sorted(shares[0] + shares[1]) == sorted(manifest.problems(tmp_path, made))


def test_format_1_is_read(made: Manifest, tmp_path: Path) -> None:
    body = json.loads(made.encode())
    del body["digest"], body["chunk_bytes"]
    body["format"] = 1
    body["files"] = {
        n: [len(d), xxh3_128_hexdigest(d)]
        for n, d in (("big", BIG), ("empty", b""), ("small", SMALL))
    }
    body["digest"] = xxh3_128_hexdigest(json.dumps(body, sort_keys=True).encode())
    (tmp_path / manifest.NAME).write_text(json.dumps(body))
    old = manifest.read(tmp_path)
    assert manifest.problems(tmp_path, old) == [] and old.nbytes == 103
    (tmp_path / "big").write_bytes(BIG[:99] + b"!")
    assert manifest.problems(tmp_path, old) == ["big doesn't match its checksum in bytes 0 to 100"]
