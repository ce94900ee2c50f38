"""Settings of servers: their limits, and the specification of a node's servers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from trainer.config.schema import Rollout

SERVER_MODULE = "trainer.rollout.vllm.server.serve"
"""The module that a server's process runs."""


@dataclass(frozen=True, kw_only=True)
class ServerLimits:
    """Time-outs and restarts of a server."""

    start_timeout_s: float
    """Until it is ready, and until it has read weights."""
    timeout_s: float
    """Without a reply or a step."""
    max_restarts: int
    """Since the last weights."""

    @classmethod
    def from_config(cls, rollout: Rollout) -> ServerLimits:
        """Take the limits from ``actor_rollout_ref.rollout``."""
        return cls(
            start_timeout_s=rollout.server.start_timeout_s,
            timeout_s=rollout.timeout_s,
            max_restarts=rollout.max_restarts,
        )


@dataclass(frozen=True, kw_only=True)
class ServerSpec:
    """The servers of a node."""

    engine_args: dict[str, Any]
    """Of vLLM, the same for all."""
    environments: Sequence[dict[str, str]]
    """For each server the variables that assign it cores or GPUs."""
    limits: ServerLimits
    module: str = SERVER_MODULE
