"""Ranks that share an engine: whatever each of them does, they take the same steps and none is left
waiting.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.rollout import EngineFailed, Finished, Group, NotFiniteError, Sampling
from trainer.rollout.vllm.engine.core import Drawn
from trainer.rollout.vllm.engine.requests import Request, Tally
from trainer.rollout.vllm.in_process.generation import Steps
from trainer.rollout.vllm.in_process.shards import Shards

SAMPLING = Sampling(max_response_length=9)
WAIT_S = 100.0


@dataclass(frozen=True, kw_only=True)
class Threads(Shards):
    """Shards that are threads of one process."""

    barrier: threading.Barrier
    board: dict[int, Tensor]

    @classmethod
    def several(cls, size: int) -> list[Threads]:
        barrier, board = threading.Barrier(size, timeout=WAIT_S), {}  # type: ignore[var-annotated]
        return [cls(size=size, index=i, barrier=barrier, board=board) for i in range(size)]

    def _gather(self, values: Tensor) -> Tensor:
        try:
            self.board[self.index] = values
            self.barrier.wait()
            found = torch.stack([self.board[i] for i in range(self.size)])
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise EngineFailed("gone") from error
        return found


@dataclass
class Fake:
    """Draws two tokens of each request in a step; request ``s`` has 1 + s % 9 of them. ``log``:
    what it was told.
    """

    shards: Threads
    log: list[str] = field(default_factory=list)
    rows: dict[str, tuple[Request, list[int]]] = field(default_factory=dict)
    spoil: Callable[[Drawn], Drawn] = lambda drawn: drawn

    @property
    def open(self) -> int:
        return len(self.rows)

    def add(self, request: Request, sampling: Sampling, eos_ids: list[int]) -> None:
        self.log.append(f"add {request.key} {request.prompt_ids} {request.seed}")
        self.rows[request.key] = (request, [])

    def step(self) -> list[Drawn]:
        self.shards.tell([1])  # as a model that is split waits for its other half
        self.log.append(f"step {sorted(self.rows)}")
        ended = []
        for key, (request, drawn) in list(self.rows.items()):
            length = 1 + request.sample_id % 9
            drawn += [request.sample_id] * min(2, length - len(drawn))
            if len(drawn) == length:
                del self.rows[key]
                ended.append(self.spoil(Drawn(key, drawn, [-1.0] * length, "stop")))
        return ended

    def abort(self, keys: Iterable[str]) -> list[Drawn]:
        self.log.append(f"abort {list(keys)}")
        found = [(key, self.rows.pop(key)[1]) for key in keys if key in self.rows]
        return [Drawn(key, drawn, [-1.0] * len(drawn), None) for key, drawn in found]

    def close(self) -> None:
        self.shards.barrier.abort()


def together(size: int, act: Callable[[int, Threads, Fake], Any]) -> tuple[list[Any], list[Fake]]:
    """What ``act`` gives or raises on each rank; all end within the time."""
    shards = Threads.several(size)
    cores, results = [Fake(s) for s in shards], [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, shards[rank], cores[rank])
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
        assert not thread.is_alive()
    return results, cores


def begin(shards: Threads, core: Fake, groups: Sequence[Group], seed: int = 1) -> Steps:
    tally = Tally(groups, SAMPLING, seed=seed, version=0, max_model_len=20)
    return Steps(core, shards, tally, SAMPLING, [], rows=4, stats={})


def group(*sample_ids: int) -> Group:
    return Group(prompt_ids=[7, 8, *sample_ids], sample_ids=sample_ids, step=2)


def lengths(finished: Iterable[Finished]) -> dict[int, list[tuple[int, str]]]:
    return {f.number: [(len(s.response_ids), s.finish_reason) for s in f.samples] for f in finished}


SHARES = [[group(0, 8), group(2)], [], [group(5), group(4, 1), group(3), group(7)]]


def test_every_rank_gets_its_own_and_all_take_the_same_steps() -> None:
    results, cores = together(
        3, lambda rank, shards, core: lengths(begin(shards, core, SHARES[rank], seed=rank - 1))
    )
    assert results == [
        {i: [(1 + s, "stop") for s in g.sample_ids] for i, g in enumerate(share)}
        for share in SHARES
    ]
    assert cores[0].log == cores[1].log == cores[2].log and all(core.open == 0 for core in cores)
    begun = [line.split()[1] for line in cores[0].log if line.startswith("add")]
    assert begun == [
        "0/0.0",
        "0/0.1",
        "2/0.0",
        "0/1.0",
        "2/1.0",
        "2/1.1",
        "2/2.0",
        "2/3.0",
    ]  # first groups first
    assert cores[0].log[0] == f"add 0/0.0 [7, 8, 0, 8] {2**64 - 1}"


def test_the_last_group_is_handed_out_when_nobody_is_needed_any_more() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> int:
        for _ in begin(shards, core, [group(0)] if rank else [group(8)]):
            return core.open  # and goes its own ways
        return -1

    assert together(2, act)[0] == [0, 0]


def test_one_leaves_early_and_the_others_go_on() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> Any:
        steps = begin(shards, core, SHARES[rank])
        if rank:
            return lengths(steps)
        first = lengths([next(iter(steps))])
        return first, lengths(steps.stop())

    results, cores = together(3, act)
    assert results[0] == ({1: [(3, "stop")]}, {0: [(1, "stop"), (4, "aborted")]})
    assert results[2] == {
        i: [(1 + s, "stop") for s in g.sample_ids] for i, g in enumerate(SHARES[2])
    }
    assert cores[0].log == cores[1].log == cores[2].log and "abort ['0/0.1']" in cores[0].log


def test_groups_that_end_in_one_turn_are_left_to_a_stop() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> Any:
        steps = begin(shards, core, [group(0), group(1), group(8)])
        return lengths([next(iter(steps))]), lengths(steps.stop())

    first, left = together(1, act)[0][0]
    assert first == {0: [(1, "stop")]} and left == {1: [(2, "stop")], 2: [(2, "aborted")]}


def test_what_is_not_finite_is_seen_by_all_in_the_same_turn() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> None:
        core.spoil = lambda d: (
            Drawn(d.key, d.token_ids, [float("nan")], d.reason) if d.key == "0/1.0" else d
        )
        list(begin(shards, core, SHARES[rank]))

    results, cores = together(3, act)
    assert all(isinstance(result, NotFiniteError) for result in results)
    assert cores[0].log == cores[1].log == cores[2].log and all(core.open == 0 for core in cores)


def test_shards_that_draw_different_tokens() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> None:
        if rank == 1:
            core.spoil = lambda d: Drawn(d.key, [*d.token_ids[:-1], 99], d.log_probs, d.reason)
        list(begin(shards, core, SHARES[rank]))

    for result in together(3, act)[0]:
        assert isinstance(result, EngineFailed) and "did not draw the same tokens" in str(result)


def test_an_engine_that_fails_on_one_rank_keeps_nobody_waiting() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> None:
        def fail(drawn: Drawn) -> Drawn:
            raise RuntimeError("out of memory")

        core.spoil = fail if rank == 1 else core.spoil
        list(begin(shards, core, SHARES[rank]))

    results = together(3, act)[0]
    assert all(isinstance(result, EngineFailed) for result in results) and "out of memory" in str(
        results[1]
    )


def test_one_that_has_nothing_to_share_keeps_nobody_waiting() -> None:
    def act(rank: int, shards: Threads, core: Fake) -> None:
        if rank == 0:
            shards.share(None)
            raise UserError("a prompt is too long")
        list(begin(shards, core, SHARES[rank]))

    first, second = together(2, act)[0]
    assert isinstance(first, UserError)
    assert isinstance(second, EngineFailed) and "shard 0 of the vllm engine" in str(second)


@pytest.mark.parametrize("size", [1, 2])
def test_nothing_at_all(size: int) -> None:
    assert (
        together(size, lambda rank, shards, core: list(begin(shards, core, [])))[0] == [[]] * size
    )
