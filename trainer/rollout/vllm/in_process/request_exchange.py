"""The exchange by which shards learn each other's requests, and the order in which all begin them.

A shard's requests travel as one int64 tensor: their number, their seeds, and for each request its
``FIELDS``, the length of its prompt and the prompt.
"""

from __future__ import annotations

from itertools import chain

import numpy as np
import torch
from torch import Tensor

from trainer.rollout.vllm.engine.requests import Request
from trainer.rollout.vllm.in_process.shards import Shards

FIELDS = ("group_number", "sample_number", "max_tokens", "step", "sample_id", "position")
"""Attributes of a request, in the order in which they are sent."""


def gather_requests(shards: Shards, requests: list[Request]) -> list[tuple[int, Request]]:
    """Return the requests of all shards, each with its shard's index, in one order for all.

    First every shard's first group, then every shard's second one, and so on; the requests of a
    group stay together.
    """
    if shards.size == 1:
        return [(0, request) for request in requests]
    turns: list[tuple[int, int, list[Request]]] = []
    for shard, tensor in enumerate(shards.gather_tensors(_encode(requests))):
        for turn, group in enumerate(_by_group(_decode(tensor))):
            turns.append((turn, shard, group))
    turns.sort(key=lambda entry: entry[:2])
    return [(shard, request) for _, shard, group in turns for request in group]


def _by_group(requests: list[Request]) -> list[list[Request]]:
    groups: dict[int, list[Request]] = {}
    for request in requests:
        groups.setdefault(request.group_number, []).append(request)
    return list(groups.values())


def _encode(requests: list[Request]) -> Tensor:
    rows = [
        [*(getattr(r, name) for name in FIELDS), len(r.prompt_ids), *r.prompt_ids] for r in requests
    ]
    seeds = np.array([r.seed % 2**64 for r in requests], dtype=np.uint64).view(np.int64)
    flat = np.fromiter(chain.from_iterable(rows), dtype=np.int64)
    return torch.from_numpy(np.concatenate([[len(requests)], seeds, flat]))


def _decode(tensor: Tensor) -> list[Request]:
    numbers = tensor.numpy()
    count = int(numbers[0])
    seeds = numbers[1 : 1 + count].view(np.uint64).tolist()
    flat = numbers[1 + count :].tolist()
    requests = []
    offset = 0
    for seed in seeds:
        fields = dict(zip(FIELDS, flat[offset : offset + len(FIELDS)], strict=True))
        prompt_start = offset + len(FIELDS) + 1
        offset = prompt_start + flat[prompt_start - 1]
        request_id = f"{fields['group_number']}.{fields['sample_number']}"
        prompt_ids = flat[prompt_start:offset]
        requests.append(Request(request_id=request_id, prompt_ids=prompt_ids, seed=seed, **fields))
    return requests
