"""Nested states (random numbers, positions, counters) as bytes without code: safetensors, the tree
in its header.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

_MARK = "__kind__"
_TREE = "tree"


def encode(state: dict[str, Any]) -> bytes:
    """Dicts (keys: str or int), lists, tuples, JSON scalars, bytes, numpy arrays and scalars, and
    tensors.

    Raises TypeError that names the place of anything else.
    """
    tensors: dict[str, torch.Tensor] = {}
    tree = json.dumps(_plain(state, tensors, "state"))
    return bytes(save({name: t.contiguous() for name, t in tensors.items()}, {_TREE: tree}))


def decode(data: bytes) -> dict[str, Any]:
    """The state as it was given to ``encode``; tensors on the CPU. Raises ValueError when ``data``
    is no such state.
    """
    try:
        length = int.from_bytes(data[:8], "little")
        tree = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][_TREE])
        tensors = load(data)
    except (ValueError, KeyError, SafetensorError) as error:
        raise ValueError(f"no saved state ({error})") from error
    state: dict[str, Any] = _rich(tree, tensors)
    return state


def _plain(value: Any, tensors: dict[str, torch.Tensor], at: str) -> Any:
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, np.generic):
        return value
    if isinstance(value, torch.Tensor):
        return {_MARK: "tensor", "name": _keep(value.detach().cpu(), tensors)}
    if isinstance(value, np.generic):
        return {
            _MARK: "scalar",
            "dtype": value.dtype.str,
            "name": _keep(_bytes_tensor(value.tobytes()), tensors),
        }
    if isinstance(value, np.ndarray):
        if value.dtype.hasobject:
            raise TypeError(f"{at} is an array of objects; only numbers are saved")
        data = _bytes_tensor(np.ascontiguousarray(value).tobytes())
        return {
            _MARK: "array",
            "dtype": value.dtype.str,
            "shape": list(value.shape),
            "name": _keep(data, tensors),
        }
    if isinstance(value, (bytes, bytearray)):
        return {_MARK: "bytes", "name": _keep(_bytes_tensor(bytes(value)), tensors)}
    if isinstance(value, (list, tuple)):
        items = [_plain(v, tensors, f"{at}[{i}]") for i, v in enumerate(value)]
        return items if isinstance(value, list) else {_MARK: "tuple", "items": items}
    if isinstance(value, dict):
        if not all(isinstance(k, (str, int)) and not isinstance(k, bool) for k in value):
            raise TypeError(f"{at} has keys that are neither str nor int")
        if all(isinstance(k, str) for k in value) and _MARK not in value:
            return {k: _plain(v, tensors, f"{at}.{k}") for k, v in value.items()}
        return {
            _MARK: "dict",
            "items": [[k, _plain(v, tensors, f"{at}.{k}")] for k, v in value.items()],
        }
    raise TypeError(
        f"{at} is a {type(value).__name__}; a checkpoint holds numbers, strings, lists, dicts, "
        "arrays, tensors"
    )


def _rich(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    if isinstance(value, list):
        return [_rich(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    kind = value.get(_MARK)
    if kind is None:
        return {k: _rich(v, tensors) for k, v in value.items()}
    if kind == "dict":
        return {k: _rich(v, tensors) for k, v in value["items"]}
    if kind == "tuple":
        return tuple(_rich(v, tensors) for v in value["items"])
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


def _keep(tensor: torch.Tensor, tensors: dict[str, torch.Tensor]) -> str:
    name = str(len(tensors))
    # A copy: safetensors refuses tensors that share memory, and the live one may change before it
    # is written.
    tensors[name] = tensor.clone(memory_format=torch.contiguous_format)
    return name


def _bytes_tensor(data: bytes) -> torch.Tensor:
    return (
        torch.frombuffer(bytearray(data), dtype=torch.uint8)
        if data
        else torch.empty(0, dtype=torch.uint8)
    )
