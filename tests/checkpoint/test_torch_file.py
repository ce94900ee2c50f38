"""The image of a torch file reads back as what torch itself would have saved."""

from __future__ import annotations

import io
from collections import OrderedDict, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from trainer.checkpoint.snapshot.torch_file import lay_out
from trainer.checkpoint.snapshot.zip_layout import ALIGNMENT


def file_of(state: Any) -> bytes:
    file = lay_out(state)
    data = bytearray(file.size)
    for offset, part in file.parts:
        data[offset : offset + len(part)] = part
    for record in file.tensors:
        assert record.offset % ALIGNMENT == 0
        flat = record.tensor.contiguous().view(-1)
        contents = flat.view(torch.uint8).numpy().tobytes() if record.nbytes else b""
        data[record.offset : record.offset + record.nbytes] = contents
    return bytes(data)


def by_torch(state: Any, **keywords: Any) -> Any:
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), **keywords)


def same(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_what_deepspeed_saves_is_read_without_running_code() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(module.parameters())
    module(torch.ones(2, 3, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    state = {
        "module": module.state_dict(),
        "optimizer": optimizer.state_dict(),
        "lr": None,
        "flags": [True, False],
    }
    loaded = torch.load(io.BytesIO(file_of(state)), weights_only=True)
    assert same(loaded, by_torch(state, weights_only=True))
    assert loaded["module"]._metadata == module.state_dict()._metadata


def test_every_kind_of_object() -> None:
    state = {
        "numbers": [0, -1, 255, 2**31 - 1, 2**31, -(2**31) - 1, 10**30, 0.1, float("inf")],
        "words": ("", "ö", "a" * 300, b"bytes"),
        3: {
            "size": torch.Size([2, 3]),
            "dtype": torch.int8,
            "set": {1, 2},
            "path": Path("x"),
            "nested": ((), [], {}),
        },
        "odd": deque([torch.arange(3), OrderedDict(a=1)]),
        "parameter": nn.Parameter(torch.ones(2)),
        "types": [
            torch.zeros(2, dtype=t) for t in (torch.float16, torch.int64, torch.bool, torch.uint8)
        ],
        "shapes": [
            torch.tensor(1.5),
            torch.empty(0, 3),
            torch.arange(6).view(2, 3).t(),
            torch.arange(10)[3:5],
        ],
    }
    loaded = torch.load(io.BytesIO(file_of(state)), weights_only=False)
    wanted = by_torch(state, weights_only=False)
    assert same(list(loaded.pop("odd")), list(wanted.pop("odd")))
    parameter = loaded.pop("parameter")
    assert parameter.requires_grad and same(parameter.detach(), wanted.pop("parameter").detach())
    assert same(loaded, wanted)


def test_tied_weights_are_stored_once() -> None:
    weight = torch.arange(1000.0)
    loaded = torch.load(io.BytesIO(file_of({"embed": weight, "head": weight})), weights_only=True)
    assert loaded["embed"].data_ptr() == loaded["head"].data_ptr()


def test_tensors_of_a_later_step_have_the_same_offsets() -> None:
    tensors = [torch.zeros(100), torch.zeros(3)]
    one, other = (lay_out({"step": step, "tensors": tensors}) for step in (1, 10**12))
    assert [r.offset for r in one.tensors] == [r.offset for r in other.tensors]


def test_a_sparse_tensor_is_refused() -> None:
    with pytest.raises(TypeError, match="can't be saved"):
        lay_out({"x": torch.eye(2).to_sparse()})
