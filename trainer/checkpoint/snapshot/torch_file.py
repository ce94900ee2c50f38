"""The file format of ``torch.save``, laid out before a byte is copied: so tensors go from where
they live straight into the image of the file, and where each of them will lie in the file is known
without reading it.

A torch file is a zip archive of stored (uncompressed) records: ``data.pkl`` with the objects,
``data/K`` with each tensor's bytes. The record's CRC fields hold 0, as with
``torch.serialization.set_crc32_options(False)``: the manifest's xxh3 covers the file. Layout:
APPNOTE.TXT sections 4.3.6 to 4.5.3; always with zip64 fields.
"""

from __future__ import annotations

import io
import pickle
import struct
from collections import OrderedDict
from dataclasses import dataclass
from functools import lru_cache
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


class _Tensors:
    """The tensors of an object in the order they are met. Tied weights are one tensor under two
    names: one here too.
    """

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []
        self._seen: dict[tuple[Any, ...], int] = {}

    def key(self, tensor: torch.Tensor) -> int:
        if tensor.layout != torch.strided or tensor.dtype not in _STORAGES:
            raise TypeError(
                f"a tensor of layout {tensor.layout} and type {tensor.dtype} can't be saved"
            )
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device)
        key = self._seen.get(place) if tensor.numel() else None
        if key is None:
            key = self._seen[place] = len(self.found)
            self.found.append(tensor.detach())
        return key


class _Pickler(pickle.Pickler):
    """Pickles any object the way ``torch.save`` does; tensors are collected, not copied."""

    def __init__(self, out: io.BytesIO, tensors: _Tensors) -> None:
        super().__init__(out, protocol=2)
        self._tensors = tensors

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        storage = _Storage(str(self._tensors.key(obj)), obj.dtype, obj.numel())
        shape = tuple(obj.shape)
        return torch._utils._rebuild_tensor_v2, (
            storage,
            0,
            shape,
            _strides(shape),
            obj.requires_grad,
            OrderedDict(),
        )

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", getattr(torch, _STORAGES[obj.dtype]), obj.key, "cpu", obj.numel)
        return None


_ORDERED = b"ccollections\nOrderedDict\n)R"
_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def _pickle(value: Any, out: list[bytes], tensors: _Tensors) -> None:
    """What ``_Pickler`` writes, for what states consist of, without its calls for every object: a
    tenth of the time, which training waits for. The opcodes are those of pickle's protocol 2;
    nothing is memoised, so an object that appears twice is written twice.
    """
    kind = type(value)
    if kind is str:
        data = value.encode("utf-8", "surrogatepass")
        out.append(struct.pack("<cI", b"X", len(data)) + data)
    elif kind is bool or value is None:
        out.append(_CONSTANTS[value])
    elif kind is int and -(1 << 31) <= value < 1 << 31:
        out.append(struct.pack("<ci", b"J", value))
    elif kind is float:
        out.append(struct.pack(">cd", b"G", value))
    elif isinstance(value, torch.Tensor):
        head, tail = _around_key(value.dtype, tuple(value.shape), value.requires_grad)
        out.append(head)
        _pickle(str(tensors.key(value)), out, tensors)
        out.append(tail)
    elif kind is dict or kind is OrderedDict:
        out.append(b"}(" if kind is dict else _ORDERED + b"(")
        for name, item in value.items():
            _pickle(name, out, tensors)
            _pickle(item, out, tensors)
        out.append(b"u")
        if kind is OrderedDict and vars(value):
            _pickle(vars(value), out, tensors)
            out.append(b"b")
    elif kind is list or kind is tuple:
        out.append(b"](" if kind is list else b"(")
        for item in value:
            _pickle(item, out, tensors)
        out.append(b"e" if kind is list else b"t")
    else:
        data = io.BytesIO()
        _Pickler(data, tensors).dump(value)
        out.append(
            data.getvalue()[2:-1]
        )  # without the head and the stop; its memo is of no concern to the rest


@lru_cache(maxsize=4096)
def _around_key(
    dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> tuple[bytes, bytes]:
    """A tensor's opcodes before and after its storage's key."""
    numel = 1
    for size in shape:
        numel *= size
    head, tail = (
        _pickled("storage") + f"ctorch\n{_STORAGES[dtype]}\n".encode(),
        _pickled("cpu") + _pickled(numel),
    )
    rest = b"".join(_pickled(value) for value in (0, shape, _strides(shape), requires_grad))
    return b"ctorch._utils\n_rebuild_tensor_v2\n((" + head, tail + b"tQ" + rest + _ORDERED + b"tR"


def _pickled(value: Any) -> bytes:
    out: list[bytes] = []
    _pickle(value, out, _Tensors())
    return b"".join(out)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of a contiguous tensor."""
    return torch.empty(shape, device="meta").stride()


def lay_out(state: Any) -> Archive:
    """The archive that ``torch.load`` reads as ``state``. Touches no tensor's contents."""
    tensors = _Tensors()
    out = [b"\x80\x02"]
    _pickle(state, out, tensors)
    sizes = tuple(tensor.numel() * tensor.element_size() for tensor in tensors.found)
    zipped, offsets = _tensor_records(sizes)
    zipped = zipped.copy()
    zipped.add("data.pkl", b"".join([*out, b"."]))
    zipped.add("byteorder", b"little")
    zipped.add("version", b"3\n")
    zipped.finish()
    leaves = [Leaf(*leaf) for leaf in zip(tensors.found, offsets, sizes, strict=True)]
    return Archive(zipped.position, zipped.pieces, leaves)


@lru_cache(maxsize=8)
def _tensor_records(sizes: tuple[int, ...]) -> tuple[_Zip, list[int]]:
    """Tensors come first in the file: so where they lie depends on their sizes alone, the same at
    every step.
    """
    zipped = _Zip()
    return zipped, [zipped.reserve(f"data/{key}", nbytes) for key, nbytes in enumerate(sizes)]


class _Zip:
    """Positions and headers of a zip64 archive of stored records."""

    def __init__(self) -> None:
        self.position = 0
        self.pieces: list[tuple[int, bytes]] = []
        self._central: list[bytes] = []

    def copy(self) -> _Zip:
        """One that may grow by itself."""
        other = _Zip()
        other.position, other.pieces, other._central = (
            self.position,
            list(self.pieces),
            list(self._central),
        )
        return other

    def add(self, name: str, data: bytes) -> None:
        self.pieces.append((self.reserve(name, len(data)), data))

    def reserve(self, name: str, nbytes: int) -> int:
        """Room for a record; the offset of its first byte, aligned."""
        path = f"{_PREFIX}/{name}".encode()
        start = self.position
        fixed = 30 + len(path) + 20 + 4  # header, name, zip64 field, head of the padding field
        padding = -(start + fixed) % ALIGNMENT
        extra = (
            struct.pack("<HHQQ", 1, 16, nbytes, nbytes)
            + struct.pack("<HH", 0x4246, padding)
            + b"Z" * padding
        )
        sizes = (0, 0xFFFFFFFF, 0xFFFFFFFF)
        header = struct.pack(
            "<IHHHHHIIIHH", 0x04034B50, 45, 0x800, 0, 0, 0x21, *sizes, len(path), len(extra)
        )
        self.pieces.append((start, header + path + extra))
        zip64 = struct.pack("<HHQQQ", 1, 24, nbytes, nbytes, start)
        self._central.append(
            struct.pack(
                "<IHHHHHHIIIHHHHHII",
                0x02014B50,
                45,
                45,
                0x800,
                0,
                0,
                0x21,
                *sizes,
                len(path),
                len(zip64),
                0,
                0,
                0,
                0,
                0xFFFFFFFF,
            )
            + path
            + zip64
        )
        data = start + fixed + padding
        self.position = data + nbytes
        return data

    def finish(self) -> None:
        start, count = self.position, len(self._central)
        directory = b"".join(self._central)
        end64 = struct.pack(
            "<IQHHIIQQQQ", 0x06064B50, 44, 45, 45, 0, 0, count, count, len(directory), start
        )
        locator = struct.pack("<IIQI", 0x07064B50, 0, start + len(directory), 1)
        end = struct.pack("<IHHHHIIH", 0x06054B50, 0, 0, 0xFFFF, 0xFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0)
        tail = directory + end64 + locator + end
        self.pieces.append((start, tail))
        self.position = start + len(tail)
