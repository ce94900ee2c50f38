"""The engine ``vllm_server``: a rank's client of vLLM servers."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import Tensor

from trainer.base import signals
from trainer.base.errors import UserError
from trainer.rollout.protocol import EngineFailed, Generation, Group
from trainer.rollout.settings import KEY, Sampling
from trainer.rollout.vllm.client.generation import ServerGeneration
from trainer.rollout.vllm.client.pool import ServerPool
from trainer.rollout.vllm.client.spec import ServerLimits
from trainer.rollout.vllm.client.status_file import PoolStatus
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.requests import RequestTracker

FIRST_POLL_S = 0.001
"""Seconds between two reads of the servers' status, at first; the time grows up to ``poll_s``."""


class VllmServerEngine:
    """This rank's engine over the servers of ``pool``.

    All ranks call ``start``, ``update_weights`` and ``close``. The methods are those of
    :class:`trainer.rollout.protocol.RolloutEngine`.
    """

    shares_weights = False

    def __init__(
        self, pool: ServerPool, options: Options, *, eos_ids: Sequence[int], limits: ServerLimits
    ) -> None:
        self.pool = pool
        self.options = options
        self.eos_ids = eos_ids
        self.limits = limits
        self.version = 0
        self._generation: ServerGeneration | None = None
        self._stats: dict[str, float] = {}

    def start(self) -> None:
        """Start the servers and wait until all are ready.

        Raises :class:`UserError` for a model or a setting that vLLM refuses, EngineFailed when a
        server does not become ready.
        """
        self.pool.start(self.options)
        self._wait(lambda status: all(server.address is not None for server in status.slots))

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """Begin to generate; group k goes to server k, counted around.

        Raises :class:`UserError` for an empty prompt, or one that leaves no room for its response.
        """
        tracker = RequestTracker(
            groups,
            sampling,
            seed=seed,
            version=self.version,
            max_model_len=self.options.max_model_len,
        )
        self._generation = ServerGeneration(
            self.pool,
            tracker,
            sampling,
            self.eos_ids,
            max_num_seqs=self.options.max_num_seqs,
            limits=self.limits,
            stats=self._stats,
        )
        return self._generation

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand over the weights and wait until every server has them.

        Raises EngineFailed when a server does not get them.
        """
        self.pool.update_weights(weights, version)
        self.version = version
        self._wait(lambda status: all(server.version == version for server in status.slots))

    def sleep(self) -> None:
        """Do nothing: servers have devices of their own."""

    def wake(self) -> None:
        """Do nothing, as ``sleep`` does."""

    def stats(self) -> Mapping[str, float]:
        """Return the counters of the last generation."""
        return dict(self._stats)

    def close(self) -> None:
        """End the servers, and a generation that is under way."""
        if self._generation is not None:
            self._generation.cancel()
        self.pool.close()

    def _wait(self, ready: Callable[[PoolStatus], bool]) -> None:
        """Wait until the servers are ``ready``.

        Whenever the status of a server changes, as by a restart, the whole time begins again.
        Raises StopRequested at once.
        """
        timeout_s = self.limits.start_timeout_s + self.limits.timeout_s
        deadline = time.monotonic() + timeout_s
        last_slots = ""
        pause = FIRST_POLL_S
        while True:
            signals.check()
            status = self.pool.status()
            if status is not None and status.refused:
                raise UserError(status.refused)
            if status is not None and status.failed:
                raise EngineFailed(status.failed)
            if status is not None and ready(status):
                return
            slots = "" if status is None else str(status.slots)
            if slots != last_slots:
                last_slots = slots
                deadline = time.monotonic() + timeout_s
            elif time.monotonic() > deadline:
                raise EngineFailed(
                    f"vLLM servers are not ready after {timeout_s:g} s "
                    f"({KEY}.server.start_timeout_s + timeout_s), on {self.pool.location}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, self.pool.poll_s)
