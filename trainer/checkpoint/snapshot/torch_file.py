"""The file format of ``torch.save``, laid out before a byte is copied.

So tensors are copied from where they live straight into the image of the file, and where each of
them lies in the file is known without reading it. A torch file is a zip archive: ``data.pkl`` holds
the objects, ``data/K`` the bytes of tensor K.
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

from trainer.checkpoint.snapshot.zip_layout import ZipLayout

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
class TensorRecord:
    """A tensor of the saved object and where its bytes lie in the file."""

    tensor: torch.Tensor
    offset: int
    nbytes: int


@dataclass(frozen=True)
class TorchFile:
    """A torch file of ``size`` bytes: ``parts`` (offset, bytes) around the tensors' bytes."""

    size: int
    parts: list[tuple[int, bytes]]
    tensors: list[TensorRecord]


def lay_out(state: Any) -> TorchFile:
    """The file that ``torch.load`` reads as ``state``. Doesn't read the contents of tensors.

    Raises TypeError for a tensor that can't be saved: sparse, or of a rare element type.
    """
    collected = _TensorCollector()
    opcodes = [_HEAD]
    _pickle(state, opcodes, collected)
    opcodes.append(_STOP)
    sizes = tuple(tensor.numel() * tensor.element_size() for tensor in collected.tensors)
    with_tensors, offsets = _tensor_records(sizes)
    layout = with_tensors.copy()
    layout.add("data.pkl", b"".join(opcodes))
    layout.add("byteorder", b"little")
    layout.add("version", b"3\n")
    layout.finish()
    records = zip(collected.tensors, offsets, sizes, strict=True)
    return TorchFile(layout.size, layout.parts, [TensorRecord(*record) for record in records])


@lru_cache(maxsize=8)
def _tensor_records(sizes: tuple[int, ...]) -> tuple[ZipLayout, list[int]]:
    """An archive of tensors alone, and the offsets of their data.

    Tensors come first in the file, so their offsets depend on the sizes alone: equal at every step.
    """
    layout = ZipLayout()
    offsets = [layout.reserve(f"data/{key}", nbytes) for key, nbytes in enumerate(sizes)]
    return layout, offsets


class _TensorCollector:
    """The tensors of an object in the order of their first appearance.

    Tied weights are one tensor under two names, and are saved once.
    """

    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._keys: dict[tuple[Any, ...], int] = {}

    def key(self, tensor: torch.Tensor) -> int:
        """The number of ``tensor`` in the file."""
        if tensor.layout != torch.strided or tensor.dtype not in _STORAGES:
            raise TypeError(
                f"a tensor of layout {tensor.layout} and type {tensor.dtype} can't be saved"
            )
        identity = (
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.device,
        )
        key = self._keys.get(identity) if tensor.numel() else None
        if key is None:
            key = len(self.tensors)
            self._keys[identity] = key
            self.tensors.append(tensor.detach())
        return key


@dataclass(frozen=True)
class _Storage:
    key: str
    dtype: torch.dtype
    numel: int


class _Pickler(pickle.Pickler):
    """Pickles any object the way ``torch.save`` does; tensors are collected, not copied."""

    def __init__(self, out: io.BytesIO, collected: _TensorCollector) -> None:
        super().__init__(out, protocol=2)
        self._collected = collected

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, torch.Tensor):
            return NotImplemented
        shape = tuple(obj.shape)
        storage = _Storage(str(self._collected.key(obj)), obj.dtype, obj.numel())
        strides = _strides(shape)
        hooks: OrderedDict[str, Any] = OrderedDict()
        arguments = (storage, 0, shape, strides, obj.requires_grad, hooks)
        return torch._utils._rebuild_tensor_v2, arguments

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, _Storage):
            return ("storage", getattr(torch, _STORAGES[obj.dtype]), obj.key, "cpu", obj.numel)
        return None


_HEAD = b"\x80\x02"
"""Pickle protocol 2."""
_STOP = b"."
_ORDERED_DICT = b"ccollections\nOrderedDict\n)R"
_CONSTANTS = {None: b"N", True: b"\x88", False: b"\x89"}


def _pickle(value: Any, out: list[bytes], collected: _TensorCollector) -> None:
    """Append the opcodes (protocol 2) of ``value``.

    Writes what ``_Pickler`` writes for the types that states consist of, without its calls for
    every object: in a tenth of the time, which training waits for. Nothing is memoised, so an
    object that appears twice is written twice.
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
        before, after = _around_key(value.dtype, tuple(value.shape), value.requires_grad)
        out.append(before)
        _pickle(str(collected.key(value)), out, collected)
        out.append(after)
    elif kind is dict or kind is OrderedDict:
        _pickle_dict(value, out, collected)
    elif kind is list or kind is tuple:
        out.append(b"](" if kind is list else b"(")
        for item in value:
            _pickle(item, out, collected)
        out.append(b"e" if kind is list else b"t")
    else:
        data = io.BytesIO()
        _Pickler(data, collected).dump(value)
        # Without head and stop. Its memo is independent: nothing else uses one.
        out.append(data.getvalue()[len(_HEAD) : -len(_STOP)])


def _pickle_dict(value: dict[Any, Any], out: list[bytes], collected: _TensorCollector) -> None:
    is_ordered = type(value) is OrderedDict
    out.append(_ORDERED_DICT + b"(" if is_ordered else b"}(")
    for name, item in value.items():
        _pickle(name, out, collected)
        _pickle(item, out, collected)
    out.append(b"u")
    if is_ordered and vars(value):
        _pickle(vars(value), out, collected)
        out.append(b"b")


@lru_cache(maxsize=4096)
def _around_key(
    dtype: torch.dtype, shape: tuple[int, ...], requires_grad: bool
) -> tuple[bytes, bytes]:
    """The opcodes of a tensor before and after the key of its storage."""
    numel = 1
    for size in shape:
        numel *= size
    before = (
        b"ctorch._utils\n_rebuild_tensor_v2\n(("
        + _opcodes("storage")
        + f"ctorch\n{_STORAGES[dtype]}\n".encode()
    )
    storage_end = _opcodes("cpu") + _opcodes(numel) + b"tQ"
    arguments = b"".join(_opcodes(v) for v in (0, shape, _strides(shape), requires_grad))
    return before, storage_end + arguments + _ORDERED_DICT + b"tR"


def _opcodes(value: Any) -> bytes:
    out: list[bytes] = []
    _pickle(value, out, _TensorCollector())
    return b"".join(out)


@lru_cache(maxsize=4096)
def _strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of a contiguous tensor of ``shape``."""
    return torch.empty(shape, device="meta").stride()
