"""The interface of a rollout engine: groups of responses, handed out as they finish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from trainer.base.errors import Failure
from trainer.rollout.settings import Sampling

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Sample:
    """One response as it was sampled; never decoded and tokenised again. Tensors are on the CPU."""

    response_ids: Tensor
    """int64 [response tokens], the end token included."""
    log_probs: Tensor
    """float32 [response tokens], nats, under softmax(logits / temperature) over the *whole*
    vocabulary. They therefore compare with a training forward pass; top-p and top-k only restrict
    which tokens are sampled.
    """
    finish_reason: FinishReason
    """By an end token, by the length limit, or stopped from outside. The last kind can be continued
    (``Group.partial_samples``).
    """
    version: int = 0
    """Version of the weights that generated its first token."""
    response_mask: Tensor | None = None
    """bool [response tokens]: True for tokens of the model, False for those of a tool, whose
    log-prob is 0 (set by ``trainer.rollout.turns`` alone). None: all are the model's.
    """

    def mask(self) -> Tensor:
        """``response_mask``, or all True: bool [response tokens]."""
        if self.response_mask is None:
            return torch.ones(len(self.response_ids), dtype=torch.bool)
        return self.response_mask

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors for a checkpoint."""
        return {
            "response_ids": self.response_ids,
            "log_probs": self.log_probs,
            "finish_reason": self.finish_reason,
            "version": self.version,
            "written": self.response_mask,  # the name that checkpoints have always had
        }

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Sample:
        """Restore the sample of ``state_dict``."""
        return cls(
            response_ids=state["response_ids"],
            log_probs=state["log_probs"],
            finish_reason=state["finish_reason"],
            version=state["version"],
            response_mask=state["written"],
        )

    @property
    def finished(self) -> bool:
        """Ended by an end token, not by a limit."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt and the responses to generate for it."""

    prompt_ids: Sequence[int]
    sample_ids: Sequence[int]
    """One per response. With ``step`` and the seed of the call they select its random numbers."""
    step: int
    """The training step in which the group was begun."""
    partial_samples: Sequence[Sample] = ()
    """Nothing, or one per response: those "aborted" are continued behind the tokens that they have;
    the others are returned as they are.
    """


@dataclass(frozen=True, kw_only=True)
class FinishedGroup:
    """The responses of one group, in the order of its sample ids."""

    number: int
    """Index of the group in the call."""
    samples: list[Sample]


class Generation(Protocol):
    """Groups being generated. Iterate to the end, or call ``stop``, before any other call of the
    engine.
    """

    def __iter__(self) -> Iterator[FinishedGroup]:
        """Each group as soon as its last response ends; groups are begun in the order of the call.

        Raises NotFiniteError when the model's logits are not finite, EngineFailed when the engine
        is lost for good, StopRequested within a token or two of a request.
        """

    def stop(self) -> list[FinishedGroup]:
        """End early and return every group that was not handed out yet. Its unfinished samples are
        "aborted" and have the tokens generated so far, perhaps none.
        """


class RolloutEngine(Protocol):
    """A generation engine of one rank. Its constructor is cheap; ``start`` loads."""

    shares_weights: bool
    """True: it reads the trainer's own weights, which must be gathered while it generates.
    ``update_weights`` is then called without weights, for the version alone.
    """

    def start(self) -> None:
        """Load the engine; called once. Raises UserError for a model or setting that it refuses."""

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """Begin to generate ``groups``. Equal arguments and weights give equal samples, bit for bit
        with the same kernels and batches, otherwise up to the first near-tie of two tokens.

        Raises UserError for an empty prompt and one that leaves no room for the response.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load ``weights`` and drop every cache that older ones filled.

        Names are those of the model's ``named_parameters``. Tensors are whole; each is valid only
        until the next one is taken.
        """

    def sleep(self) -> None:
        """Free memory for training, as far as the engine can."""

    def wake(self) -> None:
        """Allocate that memory again before a generation."""

    def stats(self) -> Mapping[str, float]:
        """Counters of the last generation, by metric name without prefix: ``tokens``,
        ``prompt_tokens``, ``steps``, ``busy_rows`` (mean share of ``max_num_seqs`` in use),
        ``restarts``.
        """

    def close(self) -> None:
        """End the engine's processes and free its memory. A second call does nothing."""


class NotFiniteError(Failure):
    """Nothing can be sampled: the model's logits are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite: its weights hold NaN or infinity. Go on from an "
            "earlier checkpoint "
            "(trainer.resume_mode=path trainer.resume_from_path=RUN_FOLDER/checkpoints/step_N, in "
            "a new trainer.default_local_dir) with a lower actor_rollout_ref.actor.optim.lr; where "
            "no step was trained, mend the folder of actor_rollout_ref.model.path"
        )


class EngineFailed(Failure):
    """The engine crashed or hung and could not be restarted. The run saves and ends."""
