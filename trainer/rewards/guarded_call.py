"""One call of a user's reward function in a worker process, whatever the function does."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import io
import os
import sys
from collections.abc import Awaitable
from typing import Any, TextIO

from trainer.base.errors import UserError
from trainer.base.user_code import describe_exception
from trainer.rewards.types import RewardFunction, RewardRequest, Score, to_score
from trainer.rewards.user import named_arguments

MOST_PRINTED = 100_000
"""Characters that one call may print; a function that prints without end would fill the disk."""


def call(reward: RewardFunction, request: RewardRequest, name: str) -> Score:
    """Run a user's function on one response, in this process.

    Raises UserError, naming prompt and source line, when it raises, prints more than
    ``MOST_PRINTED`` characters or returns anything but a finite number.
    """
    pid = os.getpid()
    try:
        with _limited_output():
            returned = _returned(reward, request)
    except BaseException as e:
        raise UserError(
            f"the reward function {name} raised {describe_exception(e)}, {describe(request)}"
        ) from e
    finally:
        if os.getpid() != pid:  # forked by the function: one process answers for the worker
            os._exit(0)
    try:
        return to_score(returned)
    except ValueError as e:
        raise UserError(
            f"the reward function {name} returned {e}, {describe(request)}; return a float"
        ) from e


def describe(request: RewardRequest) -> str:
    """The prompt and the beginning of the response, for messages."""
    return (
        f"for prompt {request.index} of {request.data_source} "
        f"(answer: {request.solution_text[:80]!r})"
    )


def _returned(reward: RewardFunction, request: RewardRequest) -> Any:
    optional = {name: getattr(request, name) for name in named_arguments(reward)}
    if "turns" in optional:
        optional["turns"] = [dict(turn) for turn in request.turns]
    returned = reward(
        data_source=request.data_source,
        solution_str=request.solution_text,
        ground_truth=request.ground_truth,
        extra_info=request.extra_info,
        **optional,
    )
    if inspect.isawaitable(returned):
        return asyncio.run(_awaited(returned))
    return returned


async def _awaited(returned: Awaitable[Any]) -> Any:
    return await returned


class _LimitedOutput(io.TextIOBase):
    """Passes on what is printed. Raises RuntimeError beyond ``MOST_PRINTED`` characters."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._left = MOST_PRINTED

    def write(self, text: str) -> int:
        self._left -= len(text)
        if self._left < 0:
            raise RuntimeError(f"more than {MOST_PRINTED} characters printed in one call")
        return self._stream.write(text)

    def flush(self) -> None:
        self._stream.flush()


@contextlib.contextmanager
def _limited_output() -> Any:
    with (
        contextlib.redirect_stdout(_LimitedOutput(sys.stdout)),
        contextlib.redirect_stderr(_LimitedOutput(sys.stderr)),
    ):
        yield
