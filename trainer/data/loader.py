"""A shuffled loader with worker processes whose position is exact."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import asdict
from types import TracebackType
from typing import Any

from trainer.base.environment import available_cores
from trainer.base.errors import UserError
from trainer.data.dataset import Dataset, describe
from trainer.data.example import Example
from trainer.data.forked import Forked, WorkerDied, WorkerSilent
from trainer.data.order import Order, Position, epoch_order, next_batch

Span = tuple[int, int, int]
"""epoch, offset, count."""


class Loader:
    """Batches of the whole global batch: every rank iterates the same ones and takes its share
    later.

    ``for batch in loader`` yields the rest of the epoch at hand; iterate again for the next one.
    The order of an epoch follows from (seed, epoch). With ``drop_last`` (training) what is left at
    an epoch's end and fills no batch is dropped; without it (validation) the last batch is shorter.
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
        self._dataset, self._batch_size, self._seed = dataset, batch_size, seed
        self._shuffle, self._drop_last = shuffle, drop_last
        self._num_workers, self._ahead = num_workers, max(1, num_workers * prefetch_factor)
        self._persistent, self._timeout_s = persistent_workers, timeout_s
        self._at = self._planned = Position()
        self._order: tuple[int, Order] | None = None
        self._workers: list[Forked[Span, list[Example]]] = []
        self._turn = 0
        self._pending: deque[tuple[Forked[Span, list[Example]], Position, Position]] = deque()

    def __len__(self) -> int:
        """Batches of a whole epoch."""
        size, batch = len(self._dataset), self._batch_size
        return size // batch if self._drop_last else -(-size // batch)

    @property
    def position(self) -> Position:
        """What has been delivered so far."""
        return self._at

    @property
    def epoch(self) -> int:
        """Epochs finished."""
        return self._at.epoch

    def __iter__(self) -> Iterator[list[Example]]:
        epoch = self._at.epoch
        while self._at.epoch <= epoch:
            batch = self._next()
            if self._at.epoch > epoch and not self._persistent:
                self.close()
            yield batch

    def ahead(self, batches: int) -> list[int]:
        """Samples of the next ``batches`` batches, in the order they come; all, if that is more
        than the epoch has.
        """
        order, first, count = (
            self._ordered(self._at.epoch),
            self._at.offset,
            batches * self._batch_size,
        )
        parts = (
            (order[first:], order[:first])
            if first + count > len(order)
            else (order[first : first + count],)
        )
        return [int(i) for part in parts for i in part]

    def start(self) -> None:
        """Fork the workers and let them begin; does nothing without workers or when they run
        already.
        """
        if self._workers or not self._num_workers:
            return
        self._planned, self._turn = self._at, 0
        self._workers = [Forked(self._load, f"data worker {k}") for k in range(self._num_workers)]
        self._fill()

    def close(self) -> None:
        """End the workers. The position stays; iterating on starts them anew."""
        self._pending.clear()
        workers, self._workers = self._workers, []
        for worker in workers:
            worker.close()

    def state_dict(self) -> dict[str, Any]:
        """Plain data for a checkpoint: the position and what it is a position in."""
        return {
            **asdict(self._at),
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
        ours = self.state_dict()
        if state["dataset"]["digest"] != ours["dataset"]["digest"]:
            raise UserError(
                f"the checkpoint was made on {state['dataset']['name']}, this run reads "
                f"{ours['dataset']['name']} "
                "with other content or fields. Give back the data it was made on, or begin a run "
                "in a new "
                "trainer.default_local_dir; python -m trainer.export RUN_FOLDER --out FOLDER "
                "writes the weights that "
                "actor_rollout_ref.model.path=FOLDER takes along"
            )
        for name in ("seed", "shuffle"):
            if state[name] != ours[name]:
                raise UserError(
                    f"the checkpoint was made with data.{name}={state[name]}, this run has "
                    f"{ours[name]}: samples would "
                    f"come in another order. Type data.{name}={state[name]}"
                )
        self.close()
        saved = Position(epoch=state["epoch"], offset=state["offset"], samples=state["samples"])
        self._at = next_batch(saved, len(self._dataset), self._batch_size, self._drop_last)[0]

    def __enter__(self) -> Loader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        self.close()

    def _next(self) -> list[Example]:
        if not self._num_workers:
            start, count, after = next_batch(
                self._at, len(self._dataset), self._batch_size, self._drop_last
            )
            batch = self._load((start.epoch, start.offset, count))
        else:
            self.start()
            worker, start, after = self._pending.popleft()
            try:
                batch = worker.receive(self._timeout_s)
            except (WorkerDied, WorkerSilent) as e:
                self.close()
                raise RuntimeError(
                    f"{e}. It was loading samples from {start.offset} on in epoch {start.epoch} of "
                    f"{self._dataset.fingerprint.name}; data.num_workers=0 loads in the training "
                    "process"
                ) from e
            except BaseException:
                self.close()
                raise
        self._at = after
        if self._workers:
            self._fill()
        return batch

    def _fill(self) -> None:
        while len(self._pending) < self._ahead:
            start, count, after = next_batch(
                self._planned, len(self._dataset), self._batch_size, self._drop_last
            )
            if not self._persistent and start.epoch > self._at.epoch:
                return
            worker = self._workers[self._turn % len(self._workers)]
            try:
                worker.send((start.epoch, start.offset, count))
            except WorkerDied:
                if self._pending:  # what is loaded already is delivered; its turn comes later
                    return
                self.close()
                raise
            self._turn += 1
            self._pending.append((worker, start, after))
            self._planned = after

    def _load(self, span: Span) -> list[Example]:
        epoch, offset, count = span
        return [self._dataset[int(i)] for i in self._ordered(epoch)[offset : offset + count]]

    def _ordered(self, epoch: int) -> Order:
        if self._order is None or self._order[0] != epoch:
            self._order = (epoch, epoch_order(len(self._dataset), self._seed, epoch, self._shuffle))
        return self._order[1]


def worker_count(requested: int, local_ranks: int) -> int:
    """Loader processes of a rank: ``data.num_workers``, at most the cores that its share of the
    machine has.
    """
    return min(requested, max(1, available_cores() // max(1, local_ranks)))
