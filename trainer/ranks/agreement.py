"""How ranks agree on an error: what one of them meets is raised on all of them.

A rank that left alone would leave the others waiting in their next collective, and a checkpoint
before the end takes all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from trainer.base.errors import Failure, UserError
from trainer.ranks.world import World


class AgreedError(UserError):
    """Wrong input that one rank met, raised on all ranks alike."""


_FAILURE = 1
_USER_ERROR = 2
"""Codes that ranks exchange; the largest counts."""


@contextmanager
def agreed(world: World) -> Iterator[None]:
    """Raise AgreedError on every rank when the body raises UserError on one of them. Collective."""
    error: UserError | None = None
    try:
        yield
    except UserError as user_error:
        error = user_error
    if world.any(_USER_ERROR if error is not None else 0) == _USER_ERROR:
        _raise_agreed(world, error)


def raise_on_all(world: World, error: UserError | Failure | None, *, elsewhere: Failure) -> None:
    """Raise on every rank when one of them passes an error. Collective.

    A UserError, which comes first, is raised as AgreedError with the text of the first rank that
    has one. A Failure is raised as it is, and as ``elsewhere`` on the ranks that have none.
    """
    rank_code = 0
    if isinstance(error, UserError):
        rank_code = _USER_ERROR
    elif error is not None:
        rank_code = _FAILURE
    code = world.any(rank_code)
    if code == _USER_ERROR:
        _raise_agreed(world, error if isinstance(error, UserError) else None)
    if code == _FAILURE:
        raise error or elsewhere


def _raise_agreed(world: World, error: UserError | None) -> NoReturn:
    texts = world.gather(None if error is None else str(error))
    raise AgreedError(next(text for text in texts if text is not None)) from error
