"""A shuffled loader with worker processes and an exact position."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any, NamedTuple

from trainer.base.environment import available_cores
from trainer.base.errors import UserError
from trainer.base.forked import Forked, WorkerDied, WorkerSilent
from trainer.data.dataset import Dataset, describe
from trainer.data.example import Example
from trainer.data.order import NextBatch, Order, Position, epoch_order, next_batch


class Span(NamedTuple):
    """``size`` samples of an epoch's order from ``offset`` on: what a worker loads at once."""

    epoch: int
    offset: int
    size: int


class Loader:
    """Batches of the whole global batch: every rank iterates the same ones and takes its share
    later.

    ``for batch in loader`` yields the rest of the current epoch; iterate again for the next one.
    The order of an epoch follows from (seed, epoch). With ``drop_last`` (training) samples that
    fill no batch at an epoch's end are dropped; without it (validation) the last batch is shorter.
    ``num_workers`` processes read and tokenize ``prefetch_factor`` batches ahead each; 0 loads in
    this process. They are forked at the first batch, or by :meth:`start`, after any state was
    loaded.

    Raises UserError when no batch can be filled and for samples that can't be trained on,
    RuntimeError when a worker dies or gives no batch within ``timeout_s`` seconds.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        batch_size: int,
        seed: int = 0,
        shuffle: bool = True,
        drop_last: bool = True,
        num_workers: int = 0,
        prefetch_factor: int = 2,
        persistent_workers: bool = True,
        timeout_s: float = 600.0,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, not {batch_size}")
        if drop_last and len(dataset) < batch_size:
            raise UserError(
                f"data.train_batch_size={batch_size} is more than the {len(dataset)} samples of "
                f"{dataset.fingerprint.name}; type data.train_batch_size={len(dataset)} or less"
            )
        self._dataset = dataset
        self._batch_size = batch_size
        self._seed = seed
        self._shuffle = shuffle
        self._drop_last = drop_last
        self._num_workers = num_workers
        self._prefetched_batches = max(1, num_workers * prefetch_factor)
        self._persistent = persistent_workers
        self._timeout_s = timeout_s
        self._position = Position()
        self._planned = Position()
        self._order: tuple[int, Order] | None = None
        self._workers: list[Forked[Span, list[Example]]] = []
        self._next_worker = 0
        self._pending: deque[tuple[Forked[Span, list[Example]], NextBatch]] = deque()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        size = len(self._dataset)
        if self._drop_last:
            return size // self._batch_size
        return math.ceil(size / self._batch_size)

    @property
    def position(self) -> Position:
        """What has been delivered so far."""
        return self._position

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._position.epoch

    def __iter__(self) -> Iterator[list[Example]]:
        epoch = self._position.epoch
        while self._position.epoch <= epoch:
            batch = self._next()
            if self._position.epoch > epoch and not self._persistent:
                self.close()
            yield batch

    def upcoming(self, batches: int) -> list[int]:
        """Samples of the next ``batches`` batches, in order; every sample once when these are more
        than the epoch has left.
        """
        order = self._ordered(self._position.epoch)
        first = self._position.offset
        end = first + batches * self._batch_size
        if end <= len(order):
            return [int(i) for i in order[first:end]]
        return [int(i) for part in (order[first:], order[:first]) for i in part]

    def start(self) -> None:
        """Fork the workers and let them begin; does nothing without workers or when they run
        already.
        """
        if self._workers or not self._num_workers:
            return
        self._planned = self._position
        self._next_worker = 0
        self._workers = [Forked(self._load, f"data worker {k}") for k in range(self._num_workers)]
        self._fill()

    def close(self) -> None:
        """End the workers. The position stays; iterating on starts them anew."""
        self._pending.clear()
        workers = self._workers
        self._workers = []
        for worker in workers:
            worker.close()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: the position and what it is a position in."""
        return {
            **asdict(self._position),
            "seed": self._seed,
            "shuffle": self._shuffle,
            "dataset": describe(self._dataset),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go to a saved position. Workers that run already are ended first. The batch size may have
        changed.

        Raises UserError when the checkpoint was made with other samples, seed or shuffle: the
        position would mean other samples.
        """
        current = self.state_dict()
        if state["dataset"]["digest"] != current["dataset"]["digest"]:
            raise UserError(
                f"the checkpoint was made on {state['dataset']['name']}, this run reads "
                f"{current['dataset']['name']} with other content or fields. Give back the data it "
                "was made on, or begin a run in a new trainer.default_local_dir; python -m "
                "trainer.export RUN_FOLDER --out FOLDER writes the weights that "
                "actor_rollout_ref.model.path=FOLDER takes along"
            )
        for name in ("seed", "shuffle"):
            if state[name] != current[name]:
                raise UserError(
                    f"the checkpoint was made with data.{name}={state[name]}, this run has "
                    f"{current[name]}: samples would come in another order. Type "
                    f"data.{name}={state[name]}"
                )
        self.close()
        saved = Position(epoch=state["epoch"], offset=state["offset"], samples=state["samples"])
        self._position = self._batch_after(saved).start

    def go_back(self, position: Position) -> None:
        """Go to an earlier ``position`` of this loader; its workers are ended."""
        self.close()
        self._position = position

    def __enter__(self) -> Loader:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _next(self) -> list[Example]:
        if not self._num_workers:
            planned = self._batch_after(self._position)
            batch = self._load(_span(planned))
        else:
            self.start()
            worker, planned = self._pending.popleft()
            try:
                batch = worker.receive(self._timeout_s)
            except (WorkerDied, WorkerSilent) as e:
                self.close()
                start = planned.start
                raise RuntimeError(
                    f"{e}. It was loading samples from {start.offset} on in epoch {start.epoch} of "
                    f"{self._dataset.fingerprint.name}; data.num_workers=0 loads in the training "
                    "process"
                ) from e
            except BaseException:
                self.close()
                raise
        self._position = planned.after
        if self._workers:
            self._fill()
        return batch

    def _fill(self) -> None:
        while len(self._pending) < self._prefetched_batches:
            planned = self._batch_after(self._planned)
            if not self._persistent and planned.start.epoch > self._position.epoch:
                return
            worker = self._workers[self._next_worker % len(self._workers)]
            try:
                worker.send(_span(planned))
            except WorkerDied:
                # what is loaded already is delivered first; then the next fill raises
                if self._pending:
                    return
                self.close()
                raise
            self._next_worker += 1
            self._pending.append((worker, planned))
            self._planned = planned.after

    def _batch_after(self, position: Position) -> NextBatch:
        return next_batch(position, len(self._dataset), self._batch_size, self._drop_last)

    def _load(self, span: Span) -> list[Example]:
        order = self._ordered(span.epoch)
        return [self._dataset[int(i)] for i in order[span.offset : span.offset + span.size]]

    def _ordered(self, epoch: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self._dataset), self._seed, epoch, self._shuffle))
        return self._order[1]


def _span(batch: NextBatch) -> Span:
    return Span(batch.start.epoch, batch.start.offset, batch.size)


def worker_count(requested: int, local_ranks: int) -> int:
    """Loader processes of a rank: ``data.num_workers``, at most the cores that its share of the
    machine has.
    """
    return min(requested, max(1, available_cores() // max(1, local_ranks)))
