"""Ranks that share an engine take the same steps whatever each does, and none is left waiting."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.rollout import EngineFailed, FinishedGroup, Group, NotFiniteError, Sampling
from trainer.rollout.vllm.engine.core import RequestOutput
from trainer.rollout.vllm.engine.requests import Request, RequestTracker
from trainer.rollout.vllm.in_process.generation import InProcessGeneration
from trainer.rollout.vllm.in_process.shards import Shards

SAMPLING = Sampling(max_response_length=9)
WAIT_S = 100.0


@dataclass(frozen=True, kw_only=True)
class ThreadShards(Shards):
    """Shards that are threads of one process."""

    barrier: threading.Barrier
    board: dict[int, Tensor]

    @classmethod
    def several(cls, size: int) -> list[ThreadShards]:
        barrier, board = threading.Barrier(size, timeout=WAIT_S), {}  # type: ignore[var-annotated]
        return [cls(size=size, index=i, barrier=barrier, board=board) for i in range(size)]

    def _all_gather(self, values: Tensor) -> Tensor:
        try:
            self.board[self.index] = values
            self.barrier.wait()
            rows = torch.stack([self.board[i] for i in range(self.size)])
            self.barrier.wait()
        except threading.BrokenBarrierError as error:
            raise EngineFailed("gone") from error
        return rows


@dataclass
class FakeEngine:
    """Draws two tokens of each request in a step; request ``s`` has 1 + s % 9 of them.

    ``log`` holds the calls, ``change_output`` may change what a request ends with.
    """

    shards: ThreadShards
    log: list[str] = field(default_factory=list)
    rows: dict[str, tuple[Request, list[int]]] = field(default_factory=dict)
    change_output: Callable[[RequestOutput], RequestOutput] = lambda output: output

    @property
    def num_unfinished(self) -> int:
        return len(self.rows)

    def add_request(self, request: Request, sampling: Sampling, eos_ids: list[int]) -> None:
        self.log.append(f"add {request.request_id} {request.prompt_ids} {request.seed}")
        self.rows[request.request_id] = (request, [])

    def step(self) -> list[RequestOutput]:
        self.shards.gather([1])  # as a split model waits for its other shards
        self.log.append(f"step {sorted(self.rows)}")
        ended = []
        for key, (request, drawn) in list(self.rows.items()):
            length = 1 + request.sample_id % 9
            drawn += [request.sample_id] * min(2, length - len(drawn))
            if len(drawn) == length:
                del self.rows[key]
                output = RequestOutput(key, drawn, [-1.0] * length, "stop")
                ended.append(self.change_output(output))
        return ended

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        self.log.append(f"abort {list(request_ids)}")
        aborted = [(key, self.rows.pop(key)[1]) for key in request_ids if key in self.rows]
        return [RequestOutput(key, drawn, [-1.0] * len(drawn), None) for key, drawn in aborted]

    def close(self) -> None:
        self.shards.barrier.abort()


def run_ranks(
    size: int, act: Callable[[int, ThreadShards, FakeEngine], Any]
) -> tuple[list[Any], list[FakeEngine]]:
    """Return what ``act`` returns or raises on each rank, and the engines; all end in time."""
    shards = ThreadShards.several(size)
    engines = [FakeEngine(s) for s in shards]
    results = [None] * size

    def run(rank: int) -> None:
        try:
            results[rank] = act(rank, shards[rank], engines[rank])
        except Exception as error:
            results[rank] = error  # type: ignore[call-overload]

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * WAIT_S)
        assert not thread.is_alive()
    return results, engines


def begin(
    shards: ThreadShards, engine: FakeEngine, groups: Sequence[Group], seed: int = 1
) -> InProcessGeneration:
    tracker = RequestTracker(groups, SAMPLING, seed=seed, version=0, max_model_len=20)
    return InProcessGeneration(engine, shards, tracker, SAMPLING, [], max_num_seqs=4, stats={})


def group(*sample_ids: int) -> Group:
    return Group(prompt_ids=[7, 8, *sample_ids], sample_ids=sample_ids, step=2)


def lengths(finished: Iterable[FinishedGroup]) -> dict[int, list[tuple[int, str]]]:
    return {f.number: [(len(s.response_ids), s.finish_reason) for s in f.samples] for f in finished}


SHARES = [[group(0, 8), group(2)], [], [group(5), group(4, 1), group(3), group(7)]]


def test_every_rank_gets_its_own_groups_and_all_take_the_same_steps() -> None:
    results, engines = run_ranks(
        3, lambda rank, shards, engine: lengths(begin(shards, engine, SHARES[rank], seed=rank - 1))
    )
    assert results == [
        {i: [(1 + s, "stop") for s in g.sample_ids] for i, g in enumerate(share)}
        for share in SHARES
    ]
    assert engines[0].log == engines[1].log == engines[2].log and all(
        engine.num_unfinished == 0 for engine in engines
    )
    begun = [line.split()[1] for line in engines[0].log if line.startswith("add")]
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
    assert engines[0].log[0] == f"add 0/0.0 [7, 8, 0, 8] {2**64 - 1}"


def test_the_last_group_is_yielded_when_no_rank_is_needed_any_more() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> int:
        for _ in begin(shards, engine, [group(0)] if rank else [group(8)]):
            return engine.num_unfinished  # and does not come back
        return -1

    assert run_ranks(2, act)[0] == [0, 0]


def test_one_rank_leaves_early_and_the_others_go_on() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> Any:
        generation = begin(shards, engine, SHARES[rank])
        if rank:
            return lengths(generation)
        first = lengths([next(iter(generation))])
        return first, lengths(generation.stop())

    results, engines = run_ranks(3, act)
    assert results[0] == ({1: [(3, "stop")]}, {0: [(1, "stop"), (4, "aborted")]})
    assert results[2] == {
        i: [(1 + s, "stop") for s in g.sample_ids] for i, g in enumerate(SHARES[2])
    }
    assert (
        engines[0].log == engines[1].log == engines[2].log and "abort ['0/0.1']" in engines[0].log
    )


def test_groups_that_end_in_one_round_are_left_to_a_stop() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> Any:
        generation = begin(shards, engine, [group(0), group(1), group(8)])
        return lengths([next(iter(generation))]), lengths(generation.stop())

    first, left = run_ranks(1, act)[0][0]
    assert first == {0: [(1, "stop")]} and left == {1: [(2, "stop")], 2: [(2, "aborted")]}


def test_all_ranks_notice_logits_that_are_not_finite_in_the_same_round() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> None:
        engine.change_output = lambda d: (
            RequestOutput(d.request_id, d.token_ids, [float("nan")], d.finish_reason)
            if d.request_id == "0/1.0"
            else d
        )
        list(begin(shards, engine, SHARES[rank]))

    results, engines = run_ranks(3, act)
    assert all(isinstance(result, NotFiniteError) for result in results)
    assert engines[0].log == engines[1].log == engines[2].log and all(
        engine.num_unfinished == 0 for engine in engines
    )


def test_shards_that_draw_different_tokens() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> None:
        if rank == 1:
            engine.change_output = lambda d: RequestOutput(
                d.request_id, [*d.token_ids[:-1], 99], d.log_probs, d.finish_reason
            )
        list(begin(shards, engine, SHARES[rank]))

    for result in run_ranks(3, act)[0]:
        assert isinstance(result, EngineFailed) and "did not draw the same tokens" in str(result)


def test_an_engine_that_fails_on_one_rank_keeps_nobody_waiting() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> None:
        def fail(output: RequestOutput) -> RequestOutput:
            raise RuntimeError("out of memory")

        engine.change_output = fail if rank == 1 else engine.change_output
        list(begin(shards, engine, SHARES[rank]))

    results = run_ranks(3, act)[0]
    assert all(isinstance(result, EngineFailed) for result in results) and "out of memory" in str(
        results[1]
    )


def test_a_rank_without_requests_because_of_an_error_keeps_nobody_waiting() -> None:
    def act(rank: int, shards: ThreadShards, engine: FakeEngine) -> None:
        if rank == 0:
            shards.gather_tensors(None)
            raise UserError("a prompt is too long")
        list(begin(shards, engine, SHARES[rank]))

    first, second = run_ranks(2, act)[0]
    assert isinstance(first, UserError)
    assert isinstance(second, EngineFailed) and "shard 0 of the vllm engine" in str(second)


@pytest.mark.parametrize("size", [1, 2])
def test_no_group_on_any_rank(size: int) -> None:
    assert (
        run_ranks(size, lambda rank, shards, engine: list(begin(shards, engine, [])))[0]
        == [[]] * size
    )
