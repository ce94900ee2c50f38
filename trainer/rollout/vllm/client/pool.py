"""The servers of one node, and the ranks' way to those of their own node."""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor

from trainer.rollout.vllm.client.status_file import LOOPBACK, TOKEN_BYTES, Notice, State
from trainer.rollout.vllm.client.supervisor import Keeper, Kept, Limits
from trainer.rollout.vllm.engine.model_folder import make_private, write_model_folder
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.server.shared_weights import Arrival, arrivals

if TYPE_CHECKING:  # a host imports this, and has no use for transformers
    from trainer.models import LoadedModel
    from trainer.ranks.world import World

NONCE_BITS = 48
SERVE = "trainer.rollout.vllm.server.serve"
"""The module that is a server."""


@dataclass(frozen=True, kw_only=True)
class Order:
    """What the servers of a node shall be."""

    arguments: dict[str, Any]
    """Of vLLM."""
    env: Sequence[dict[str, str]]
    """For each server the variables that give it a place."""
    limits: Limits
    module: str = SERVE


class NodeServers:
    """The servers that this process keeps on its node, and the weights they share. They end with
    it.

    ``folder``: private, for their logs. ``host``: the address they listen on, to those who know
    ``token``.
    """

    def __init__(self, folder: Path, notice: Notice, *, host: str, token: str) -> None:
        self.folder, self.notice = folder, notice
        self._host, self._token = host, token
        self._keepers: list[Keeper] = []
        self._kept = Kept()

    @property
    def pids(self) -> list[int]:
        """Of the servers."""
        return [keeper.pid for keeper in self._keepers if keeper.pid is not None]

    def start(self, order: Order) -> None:
        """Begin to start them; the notice tells how they stand."""
        self.notice.begin(len(order.env))
        for number, env in enumerate(order.env):
            keeper = Keeper(
                number,
                order.arguments,
                folder=self.folder,
                env=env,
                limits=order.limits,
                notice=self.notice,
                host=self._host,
                token=self._token,
                kept=self._kept,
                module=order.module,
            )
            self._keepers.append(keeper)
            keeper.start()

    def take(self, weights: Iterable[Arrival], version: int) -> None:
        """Keep these weights; the servers read them when this returns."""
        self._kept.write(weights, version)
        for keeper in self._keepers:
            keeper.renew()

    def close(self) -> None:
        """End them all."""
        if self._keepers:
            self.notice.give_up(failed="the engine was closed")
        for keeper in self._keepers:
            keeper.close()
        self._keepers = []
        self._kept.shared.close()


class Fleet(Protocol):
    """All servers that a rank's prompts are dealt out over. All ranks call ``start``, ``take`` and
    ``close``.
    """

    seats: int
    """How many there are."""
    first: int
    """The one that this rank's first prompt goes to."""
    place: str
    """Where they are, for messages."""
    poll_s: float
    """Longest time between two looks at them."""

    @property
    def pids(self) -> list[int]:
        """Of the servers that this process keeps."""

    def start(self, options: Options) -> None:
        """Begin to start them."""

    def read(self) -> State | None:
        """How they stand now; None before that is known."""

    def take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Hand over the weights. They are read to their end, whatever becomes of the servers."""

    def close(self) -> None:
        """End them."""


class OwnNode:
    """The servers on this rank's node, which local rank 0 keeps. ``folder``: private, the same for
    all its ranks.
    """

    poll_s = 0.05

    def __init__(
        self,
        loaded: LoadedModel,
        world: World,
        *,
        folder: Path,
        env: Sequence[dict[str, str]],
        limits: Limits,
        module: str = SERVE,
    ) -> None:
        self.seats, self.first, self.place = (
            len(env),
            world.local_rank,
            f"this node; their logs are in {folder}",
        )
        self._loaded, self._world, self._folder = loaded, world, folder
        self._env, self._limits, self._module = env, limits, module
        self._notice: Notice | None = None
        self._servers: NodeServers | None = None

    @property
    def pids(self) -> list[int]:
        """See :class:`Fleet`."""
        return [] if self._servers is None else self._servers.pids

    def start(self, options: Options) -> None:
        """See :class:`Fleet`."""
        # An earlier attempt's file is never taken for this one's.
        nonces = self._world.vector(float(secrets.randbits(NONCE_BITS)))
        make_private(self._folder)
        self._notice = Notice(
            self._folder, f"{int(nonces[self._world.rank - self._world.local_rank]):x}"
        )
        if self._world.local_rank == 0:
            model = write_model_folder(self._loaded, self._folder / "model")
            token = secrets.token_hex(TOKEN_BYTES)
            self._servers = NodeServers(self._folder, self._notice, host=LOOPBACK, token=token)
            arguments = options.arguments(str(model))
            self._servers.start(
                Order(arguments=arguments, env=self._env, limits=self._limits, module=self._module)
            )

    def read(self) -> State | None:
        """See :class:`Fleet`."""
        return None if self._notice is None else self._notice.read()

    def take(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`Fleet`."""
        if self._servers is not None:
            self._servers.take(arrivals(weights), version)
        else:
            deque(weights, maxlen=0)  # under ZeRO 3 all ranks gather

    def close(self) -> None:
        """See :class:`Fleet`."""
        if self._servers is not None:
            self._servers.close()
