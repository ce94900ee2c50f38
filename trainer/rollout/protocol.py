"""What a generation engine takes and gives: groups of responses, as they finish."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from torch import Tensor

from trainer.base.errors import Failure
from trainer.rollout.settings import Sampling

FinishReason = Literal["stop", "length", "aborted"]


@dataclass(frozen=True)
class Sample:
    """One response as it was drawn; never decoded and tokenised again.

    ``response_ids`` int64 [response tokens], the end token among them. ``log_probs`` float32
    [response tokens], nats, under softmax(logits / temperature) over the *whole* vocabulary, so
    that they compare with a training forward pass; top-p and top-k only narrow what is drawn. Both
    on the CPU.
    """

    response_ids: Tensor
    log_probs: Tensor
    finish_reason: FinishReason
    """An end token, the length limit, or stopped from outside: then it can be gone on with
    (``Group.begun``).
    """
    version: int = 0
    """Of the weights that drew its first token."""
    written: Tensor | None = None
    """bool [response tokens]: which of them the model wrote; the others, of log-prob 0, are what a
    tool answered (see ``trainer.rollout.turns``, which alone sets it). None: all.
    """

    def state_dict(self) -> dict[str, Any]:
        """Plain data and tensors for a checkpoint."""
        return {name: getattr(self, name) for name in self.__dataclass_fields__}

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Sample:
        """The sample of ``state_dict``."""
        return cls(**state)

    @property
    def finished(self) -> bool:
        """Ended by an end token, not by a limit."""
        return self.finish_reason == "stop"


@dataclass(frozen=True, kw_only=True)
class Group:
    """A prompt and the responses wanted of it."""

    prompt_ids: Sequence[int]
    sample_ids: Sequence[int]
    """One for each response. With ``step`` and the seed of the call they name its random
    numbers.
    """
    step: int
    """The iteration in which the group was first begun."""
    begun: Sequence[Sample] = ()
    """Nothing, or one for each response: those "aborted" are gone on with, behind the tokens they
    have; the others come back as they are.
    """


@dataclass(frozen=True, kw_only=True)
class Finished:
    """The responses of one group, in the order of its sample ids."""

    number: int
    """Which group of the call."""
    samples: list[Sample]


class Generation(Protocol):
    """Groups on their way. Iterate to the end, or call ``stop``, before the engine is asked for
    anything else.
    """

    def __iter__(self) -> Iterator[Finished]:
        """Each group as soon as its last response ends; groups are begun in the order they were
        given.

        Raises NotFiniteError when the model's logits are not finite, EngineFailed when the engine
        is lost for good.
        """

    def stop(self) -> list[Finished]:
        """End early: every group that was not handed out yet, its unfinished samples "aborted" with
        the tokens they have so far (none, where a sample was not begun).
        """


class RolloutEngine(Protocol):
    """A generation engine of one rank. Its constructor is cheap; ``start`` loads."""

    shares_weights: bool
    """True: it reads the trainer's own weights, which must be whole while it generates;
    ``update_weights`` is not called but with an empty iterable, for the version.
    """

    def start(self) -> None:
        """Load; once. Raises UserError for what the user can mend: a model or setting the engine
        refuses.
        """

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """Begin with these groups. Equal arguments and weights give equal samples, bit for bit on
        one machine.

        Raises UserError for an empty prompt and one that leaves no room for the response.
        """

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Take these weights (names as in the model's ``named_parameters``, whole tensors, each
        valid only until the next one is asked for) and forget every cache that older ones filled.
        """

    def sleep(self) -> None:
        """Give memory back before training, as far as the engine can."""

    def wake(self) -> None:
        """Take it again before generation."""

    def stats(self) -> Mapping[str, float]:
        """Counters of the last generation, by metric name without prefix: ``tokens``,
        ``prompt_tokens``, ``steps``, ``busy_rows`` (mean share of ``max_num_seqs`` in use),
        ``restarts``.
        """

    def close(self) -> None:
        """End processes and give everything back. Twice is fine."""


class NotFiniteError(Failure):
    """Nothing can be drawn: the model's logits are NaN or infinite."""

    def __init__(self) -> None:
        super().__init__(
            "the model's logits are not finite: its weights hold NaN or infinity. Go on from an "
            "earlier checkpoint "
            "(trainer.resume_mode=path trainer.resume_from_path=RUN_FOLDER/checkpoints/step_N, in "
            "a new "
            "trainer.default_local_dir) with a lower actor_rollout_ref.actor.optim.lr; where no "
            "step was trained, mend "
            "the folder of actor_rollout_ref.model.path"
        )


class EngineFailed(Failure):
    """The engine crashed or hung and could not be brought back. The run saves and ends."""
