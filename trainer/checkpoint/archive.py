"""The file format of ``torch.save``, laid out before a byte is copied: so tensors go from where they live straight into
the image of the file, and where each of them will lie in the file is known without reading it.

A torch file is a zip archive of stored (uncompressed) records: ``data.pkl`` with the objects, ``data/K`` with each
tensor's bytes. The record's CRC fields hold 0, as with ``torch.serialization.set_crc32_options(False)``: the manifest's
xxh3 covers the file. Layout: APPNOTE.TXT sections 4.3.6 to 4.5.3; always with zip64 fields.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import torch

ALIGNMENT = 64
_PREFIX = "archive"
_STORAGES = {
    torch.float64: "DoubleStorage",
    torch.float32: "FloatStorage",
    torch.float16: "HalfStorage",
    torch.bfloat16: "BFloat16Storage",
    torch.int64: "LongStorage",
    torch.int32: "IntStorage",
    torch.int16: "ShortStorage",
    torch.int8: "CharStorage",
    torch.uint8: "ByteStorage",
    torch.bool: "BoolStorage",
}


@dataclass(frozen=True)
class Leaf:
    """A tensor of the saved object and where its bytes lie in the file."""

    tensor: torch.Tensor
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Archive:
    """A torch file of ``size`` bytes: ``pieces`` (offset, bytes) around the leaves' bytes."""

    size: int
    pieces: list[tuple[int, bytes]]
    leaves: list[Leaf]


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles an object the way ``torch.save`` does; tensors are collected, not copied."""

    def __init__(self, out: io.BytesIO) -> None:
        super().__init__(out, protocol=2)
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[tuple[Any, ...], int] = {}

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        if obj.layout != torch.strided or obj.dtype not in _STORAGES:
            raise TypeError(f"a tensor of layout {obj.layout} and type {obj.dtype} can't be saved")
        tensor = obj.detach()
        # Tied weights are one tensor under two names: they stay one in the file.
        place = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.device)
        key = self._seen.get(place) if tensor.numel() else None
        if key is None:
            key = self._seen[place] = len(self.tensors)
            self.tensors.append(tensor)
        shape = tuple(tensor.shape)
        strides = torch.empty(shape, device="meta").stride()
        storage = _Storage(str(key), tensor.dtype, tensor.numel())
        return torch._utils._rebuild_tensor_v2, (storage, 0, shape, strides, obj.requires_grad, OrderedDict())

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", getattr(torch, _STORAGES[obj.dtype]), obj.key, "cpu", obj.numel)
        return None


def lay_out(state: Any) -> Archive:
    """The archive that ``torch.load`` reads as ``state``. Touches no tensor's contents."""
    out = io.BytesIO()
    pickler = _Pickler(out)
    pickler.dump(state)
    zipped = _Zip()
    zipped.add("data.pkl", out.getvalue())
    zipped.add("byteorder", b"little")
    leaves = []
    for key, tensor in enumerate(pickler.tensors):
        nbytes = tensor.numel() * tensor.element_size()
        leaves.append(Leaf(tensor, zipped.reserve(f"data/{key}", nbytes), nbytes))
    zipped.add("version", b"3\n")
    zipped.finish()
    return Archive(zipped.position, zipped.pieces, leaves)


class _Zip:
    """Positions and headers of a zip64 archive of stored records."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytes]] = []
        self._central: list[bytes] = []

    def add(self, name: str, data: bytes) -> None:
        self.pieces.append((self.reserve(name, len(data)), data))

    def reserve(self, name: str, nbytes: int) -> int:
        """Room for a record; the offset of its first byte, aligned."""
        path = f"{_PREFIX}/{name}".encode()
        start = self.position
        fixed = 30 + len(path) + 20 + 4  # header, name, zip64 field, head of the padding field
        padding = -(start + fixed) % ALIGNMENT
        extra = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) + struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        sizes = (0, 0xFFFFFFFF, 0xFFFFFFFF)
        header = struct.pack("<IHHHHHIIIHH", 0x04034B50, 45, 0x800, 0, 0, 0x21, *sizes, len(path), len(extra))
        self.pieces.append((start, header + path + extra))
        zip64 = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, start)
        self._central.append(
            struct.pack(
                "<IHHHHHHIIIHHHHHII", 0x02014B50, 45, 45, 0x800, 0, 0, 0x21, *sizes, len(path), len(zip64), 0, 0, 0, 0,
                0xFFFFFFFF,
            )
            + path
            + zip64
        )  # fmt: skip
        data = start + fixed + padding
        self.position = data + nbytes
        return data

    def finish(self) -> None:
        start, count = self.position, len(self._central)
        directory = b"".join(self._central)
        end64 = struct.pack("<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), start)
        locator = struct.pack("<IIQI", 0x07064B50, 0, start + len(directory), 1)
        end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        tail = directory + end64 + locator + end
        self.pieces.append((start, tail))
        self.position = start + len(tail)
