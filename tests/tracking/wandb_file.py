"""Read back what the real W&B client wrote: a LevelDB log of protobuf records."""

from __future__ import annotations

import json
import struct
import time
from pathlib import Path
from typing import Any

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER = 32768, 7
FULL, LAST = 1, 4


def records(folder: Path) -> list[Any]:
    """All records of a finished run. The client's service writes the last of them just after
    ``finish`` returns.
    """
    deadline = time.monotonic() + 200
    while True:
        found = records_now(folder)
        if any(kind_of(record) == "exit" for record in found) or time.monotonic() > deadline:
            return found
        time.sleep(0.02)


def records_now(folder: Path) -> list[Any]:
    (path,) = folder.glob("run-*.wandb")
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    at, parts, found = HEADER, b"", []
    while at + HEADER <= len(data):
        if BLOCK - at % BLOCK < HEADER:
            at += BLOCK - at % BLOCK
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + HEADER])
        if kind == 0 or at + HEADER + length > len(data):  # the service is still writing
            break
        parts += data[at + HEADER : at + HEADER + length]
        at += HEADER + length
        if kind in (FULL, LAST):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            found.append(record)
            parts = b""
    return found


def kind_of(record: Any) -> str:
    return str(record.WhichOneof("record_type"))


def history(folder: Path) -> list[dict[str, Any]]:
    return [
        {
            (item.key or "/".join(item.nested_key)): json.loads(item.value_json)
            for item in record.history.item
        }
        for record in records(folder)
        if kind_of(record) == "history"
    ]


def only(folder: Path, kind: str) -> Any:
    (record,) = [r for r in records(folder) if kind_of(r) == kind]
    return getattr(record, kind)
