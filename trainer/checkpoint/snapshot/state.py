"""Nested states (random states, positions, counters) as bytes without code: a safetensors file
whose header holds the tree.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

_KIND = "__kind__"
_TREE = "tree"
_Tensors = dict[str, torch.Tensor]


def encode(state: dict[str, Any]) -> bytes:
    """Encode ``state``.

    It may consist of dicts (keys: str or int), lists, tuples, JSON scalars, bytes, numpy arrays and
    scalars, and tensors. Raises TypeError that names the place of anything else.
    """
    tensors: _Tensors = {}
    tree = json.dumps(_to_json(state, tensors, "state"))
    return bytes(save({name: t.contiguous() for name, t in tensors.items()}, {_TREE: tree}))


def decode(data: bytes) -> dict[str, Any]:
    """The state that was given to ``encode``, its tensors on the CPU.

    Raises ValueError when ``data`` is no encoded state.
    """
    try:
        header_bytes = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + header_bytes])
        tree = json.loads(header["__metadata__"][_TREE])
        tensors = load(data)
    except (ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"no saved state ({error})") from error
    state: dict[str, Any] = _from_json(tree, tensors)
    return state


def _to_json(value: Any, tensors: _Tensors, path: str) -> Any:
    """``value`` as JSON; raw bytes are added to ``tensors`` and named there."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return value
    if isinstance(value, torch.Tensor):
        return {_KIND: "tensor", "name": _add_tensor(value.detach().cpu(), tensors)}
    if isinstance(value, np.generic):
        name = _add_bytes(value.tobytes(), tensors)
        return {_KIND: "scalar", "dtype": value.dtype.str, "name": name}
    if isinstance(value, np.ndarray):
        return _array_to_json(value, tensors, path)
    if isinstance(value, (bytes, bytearray)):
        return {_KIND: "bytes", "name": _add_bytes(bytes(value), tensors)}
    if isinstance(value, (list, tuple)):
        items = [_to_json(item, tensors, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if isinstance(value, list) else {_KIND: "tuple", "items": items}
    if isinstance(value, dict):
        return _dict_to_json(value, tensors, path)
    raise TypeError(
        f"{path} is a {type(value).__name__}; a checkpoint holds numbers, strings, lists, dicts, "
        "arrays, tensors"
    )


def _array_to_json(array: np.ndarray[Any, Any], tensors: _Tensors, path: str) -> dict[str, Any]:
    if array.dtype.hasobject:
        raise TypeError(f"{path} is an array of objects; only numbers are saved")
    return {
        _KIND: "array",
        "dtype": array.dtype.str,
        "shape": list(array.shape),
        "name": _add_bytes(np.ascontiguousarray(array).tobytes(), tensors),
    }


def _dict_to_json(value: dict[Any, Any], tensors: _Tensors, path: str) -> dict[str, Any]:
    """A JSON object where all keys are strings, else a list of pairs."""
    for key in value:
        if isinstance(key, bool) or not isinstance(key, (str, int)):
            raise TypeError(f"{path} has keys that are neither str nor int")
    items = {key: _to_json(item, tensors, f"{path}.{key}") for key, item in value.items()}
    if _KIND not in value and all(isinstance(key, str) for key in value):
        return items
    return {_KIND: "dict", "items": [[key, item] for key, item in items.items()]}


def _from_json(value: Any, tensors: _Tensors) -> Any:
    if isinstance(value, list):
        return [_from_json(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_KIND)
    if kind is None:
        return {key: _from_json(item, tensors) for key, item in value.items()}
    if kind == "dict":
        return {key: _from_json(item, tensors) for key, item in value["items"]}
    if kind == "tuple":
        return tuple(_from_json(item, tensors) for item in value["items"])
    tensor = tensors[value["name"]]
    if kind == "tensor":
        return tensor
    raw = tensor.numpy().tobytes()
    if kind == "bytes":
        return raw
    dtype = np.dtype(value["dtype"])
    if dtype.hasobject:
        raise ValueError("a saved array claims to hold objects")
    if kind == "scalar":
        return np.frombuffer(raw, dtype)[0]
    return np.frombuffer(raw, dtype).reshape(value["shape"]).copy()


def _add_tensor(tensor: torch.Tensor, tensors: _Tensors) -> str:
    """Add a copy of ``tensor``; returns its name.

    A copy, since safetensors refuses tensors that share memory, and the live one may change before
    it is written.
    """
    name = str(len(tensors))
    tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return name


def _add_bytes(data: bytes, tensors: _Tensors) -> str:
    """Add ``data`` as a uint8 tensor; returns its name."""
    tensor = torch.empty(0, dtype=torch.uint8)
    if data:
        tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return _add_tensor(tensor, tensors)
