"""The engine ``vllm_server``: vLLM in processes of its own on each node, asked over HTTP."""

from __future__ import annotations

import queue
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.errors import UserError
from trainer.models import LoadedModel
from trainer.parallel.world import World
from trainer.rollout.protocol import EngineFailed, Finished, Generation, Group
from trainer.rollout.settings import KEY, Sampling
from trainer.rollout.vllm.folder import make_private, write_model_folder
from trainer.rollout.vllm.keeper import Keeper, Kept, Limits
from trainer.rollout.vllm.node import TOKEN_BYTES, Notice, State
from trainer.rollout.vllm.options import Options
from trainer.rollout.vllm.stream import Event, Stream
from trainer.rollout.vllm.tally import Request, Tally

POLL_S = (0.001, 0.05)
"""Seconds between two looks at the notice, at first and at most."""
NONCE_BITS = 48


class VllmServerEngine:
    """This rank's view of the servers of its node, which local rank 0 keeps. ``folder``: private, the same for all
    ranks. All ranks call ``start``, ``update_weights`` and ``close``.
    """

    shares_weights = False

    def __init__(
        self,
        loaded: LoadedModel,
        options: Options,
        world: World,
        *,
        eos_ids: Sequence[int],
        folder: Path,
        replicas: int,
        limits: Limits,
        env: Sequence[dict[str, str]],
        module: str = "trainer.rollout.vllm.serve",
    ) -> None:
        """``env``: for each replica the variables of its process, which runs ``module``."""
        self.loaded, self.options, self.world, self.eos_ids, self.folder = loaded, options, world, eos_ids, folder
        self.replicas, self.limits, self.env, self.module = replicas, limits, env, module
        self.version = 0
        self._owner = world.local_rank == 0
        self._keepers: list[Keeper] = []
        self._kept = Kept()
        self._notice: Notice | None = None
        self._open: _Streams | None = None
        self._stats: dict[str, float] = {}

    @property
    def notice(self) -> Notice:
        """Where the state of this node's servers stands, once started."""
        if self._notice is None:
            raise RuntimeError("the vllm_server engine has not been started")
        return self._notice

    @property
    def pids(self) -> list[int]:
        """Of the servers that this rank keeps."""
        return [keeper.pid for keeper in self._keepers if keeper.pid is not None]

    def start(self) -> None:
        """Start the node's servers and wait until all are up.

        Raises :class:`UserError` for a model or a setting that vLLM refuses, EngineFailed when they don't come up.
        """
        # An earlier attempt's file is never taken for this one's.
        mine = secrets.randbits(NONCE_BITS)
        nonces = self.world.vector(float(mine))
        make_private(self.folder)
        self._notice = Notice(self.folder, f"{int(nonces[self.world.rank - self.world.local_rank]):x}")
        if self._owner:
            self._start_keepers()
        self._wait(lambda state: all(s.port is not None for s in state.seats))

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        tally = Tally(groups, sampling, seed=seed, version=self.version, max_model_len=self.options.max_model_len)
        parts: list[list[Request]] = [[] for _ in range(self.replicas)]
        for request in tally.open:  # a group stays together: its prompt is computed once
            parts[(request.number + self.world.local_rank) % self.replicas].append(request)
        self._open = _Streams(self, tally, parts, sampling, self._stats)
        return self._open

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`trainer.rollout.protocol.RolloutEngine`. Returns when every server of the node has them."""
        if self._owner:
            self._kept.write(weights, version)
            for keeper in self._keepers:
                keeper.renew()
        else:
            deque(weights, maxlen=0)  # under ZeRO 3 all ranks gather
        self.version = version
        self._wait(lambda state: all(s.version == version for s in state.seats))

    def sleep(self) -> None:
        """Servers have devices of their own: they give nothing back."""

    def wake(self) -> None:
        """Nothing to take."""

    def stats(self) -> Mapping[str, float]:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        return dict(self._stats)

    def close(self) -> None:
        """End the servers of this rank, and a generation that is still under way."""
        if self._open is not None:
            self._open.cancel()
        if self._keepers:
            self.notice.give_up(failed="the engine was closed")
        for keeper in self._keepers:
            keeper.close()
        self._keepers = []
        self._kept.shared.close()

    def _start_keepers(self) -> None:
        token = secrets.token_hex(TOKEN_BYTES)
        model = write_model_folder(self.loaded, self.folder / "model")
        self.notice.begin(token, self.replicas)
        for number in range(self.replicas):
            keeper = Keeper(
                number,
                self.options.arguments(str(model)),
                folder=self.folder,
                env=self.env[number],
                limits=self.limits,
                notice=self.notice,
                token=token,
                kept=self._kept,
                module=self.module,
            )
            self._keepers.append(keeper)
            keeper.start()

    def _wait(self, ready: Callable[[State], bool]) -> None:
        """Until the servers are ``ready``; each start of one, and each restart, has the whole time."""
        patience = self.limits.start_timeout_s + self.limits.timeout_s
        deadline, seen = time.monotonic() + patience, ""
        pause, longest = POLL_S
        while True:
            state = self.notice.read()
            if state is not None and state.refused:
                raise UserError(state.refused)
            if state is not None and state.failed:
                raise EngineFailed(state.failed)
            if state is not None and ready(state):
                return
            now = "" if state is None else str(state.seats)
            if now != seen:
                deadline, seen = time.monotonic() + patience, now
            elif time.monotonic() > deadline:
                raise EngineFailed(
                    f"the vLLM servers of this node are not ready after {patience:g} s "
                    f"({KEY}.server.start_timeout_s + timeout_s); their logs are in {self.folder}"
                )
            time.sleep(pause)
            pause = min(1.5 * pause, longest)


class _Streams:
    """A generation under way: servers draw whether or not anybody is asking."""

    def __init__(
        self,
        engine: VllmServerEngine,
        tally: Tally,
        parts: Sequence[Sequence[Request]],
        sampling: Sampling,
        stats: dict[str, float],
    ) -> None:
        self._tally, self._stats, self._notice = tally, stats, engine.notice
        self._rows, self._patience = engine.options.max_num_seqs, engine.limits.timeout_s
        self._events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        state = self._notice.read()
        self._restarts = 0 if state is None else state.restarts
        self._steps = self._busy = 0
        stats.clear()
        self._streams = [
            Stream(
                self._notice,
                number,
                part,
                sampling,
                engine.eos_ids,
                version=engine.version,
                limits=engine.limits,
                events=self._events,
            )
            for number, part in enumerate(parts)
            if part
        ]
        self._running = len(self._streams)
        for stream in self._streams:
            stream.start()

    def __iter__(self) -> Iterator[Finished]:
        try:
            yield from self._tally.take()
            while self._tally.open:
                self._hear(self._events.get())
                yield from self._tally.take()
            self._last_words()
        except BaseException:
            self.cancel()
            raise
        finally:
            self._count()

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        self.cancel()
        self._last_words()
        self._count()
        return self._tally.stop()

    def _last_words(self) -> None:
        deadline = time.monotonic() + self._patience
        while self._running and (left := deadline - time.monotonic()) > 0:
            try:
                self._hear(self._events.get(timeout=left), stopping=True)
            except queue.Empty:
                break

    def cancel(self) -> None:
        """End the streams, without waiting for what they have."""
        for stream in self._streams:
            stream.stop()

    def _hear(self, event: Event, *, stopping: bool = False) -> None:
        for drawn in event.drawn:
            self._tally.add(drawn.key, drawn.token_ids, drawn.log_probs)
            if drawn.reason is not None:
                self._tally.end(drawn.key, drawn.reason)
        self._steps += event.steps
        self._busy += event.busy
        self._running -= event.ended
        if event.failed and not stopping:
            raise EngineFailed(event.failed)
        if self._running == 0 and self._tally.open and not stopping:
            raise EngineFailed("the vLLM servers ended a generation before it was whole")

    def _count(self) -> None:
        state = self._notice.read()
        self._stats.update(self._tally.stats(), steps=float(self._steps))
        self._stats["busy_rows"] = self._busy / max(1, self._steps * self._rows)
        self._stats["restarts"] = float(0 if state is None else state.restarts - self._restarts)
