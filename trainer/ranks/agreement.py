"""How ranks agree on an error or a stop: what one of them meets is raised on all of them.

A rank that left alone would leave the others waiting in their next collective, and a checkpoint
before the end takes all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from trainer.base import signals
from trainer.base.errors import Failure, UserError
from trainer.base.signals import StopRequested
from trainer.ranks.world import World


class AgreedError(UserError):
    """Wrong input that one rank met, raised on all ranks alike."""


_FAILURE = 1
_STOPS = {cause: 2 + number for number, cause in enumerate(signals.CAUSES)}
_USER_ERROR = 2 + len(_STOPS)
"""Codes that ranks exchange; the largest counts. A stop hides the loss of an engine, which the same
signal may have ended; wrong input would be met again.
"""


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Raise on every rank what the body raises on one of them. Collective.

    That is AgreedError for a UserError, and StopRequested.
    """
    error: UserError | StopRequested | None = None
    try:
        yield
    except (UserError, StopRequested) as caught:
        error = caught
    _raise_input_or_stop(world, error, world.any(_code(error)))


def raise_on_all(
    world: World, error: UserError | Failure | StopRequested | None, *, elsewhere: Failure
) -> None:
    """Raise on every rank when one of them passes an error or a stop. Collective.

    A UserError, which comes first, is raised as AgreedError with the text of the first rank that
    has one, then StopRequested. A Failure is raised as it is, and as ``elsewhere`` on the ranks
    that have none. A rank that leaves at once raises its StopRequested without the others.
    """
    code = world.any(_code(error))
    _raise_input_or_stop(world, error, code)
    if code == _FAILURE:
        raise error or elsewhere


def stop_together(world: World) -> None:
    """Raise StopRequested on every rank when one of them was asked to stop. Collective."""
    cause = signals.requested()
    _raise_stop(world.any(0 if cause is None else _STOPS[cause]))


def begin_update(world: World) -> None:
    """The last point at which a step can be left: ``stop_together``; from then on requests wait.

    Collective.
    """
    with signals.deferred():
        stop_together(world)


def _code(error: UserError | Failure | StopRequested | None) -> int:
    """What this rank tells the others. Raises StopRequested where it leaves without them."""
    if error is None:
        return 0
    if isinstance(error, UserError):
        return _USER_ERROR
    if isinstance(error, Failure):
        cause = signals.requested()
        return _FAILURE if cause is None else _STOPS[cause]
    if signals.leaves_at_once():
        raise error
    return _STOPS[error.cause]


def _raise_input_or_stop(
    world: World, error: UserError | Failure | StopRequested | None, code: int
) -> None:
    if code == _USER_ERROR:
        _raise_agreed(world, error if isinstance(error, UserError) else None)
    _raise_stop(code)


def _raise_stop(code: int) -> None:
    for cause, number in _STOPS.items():
        if number == code:
            raise StopRequested(cause)


def _raise_agreed(world: World, error: UserError | None) -> NoReturn:
    texts = world.gather(None if error is None else str(error))
    raise AgreedError(next(text for text in texts if text is not None)) from error
