"""Agents, which answer the model between two of its turns, and the time limit of their calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

from trainer.base import signals
from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.base.user_code import describe_exception
from trainer.rollout.settings import KEY

LOOP_SLACK_S = 30.0
"""Time beyond the limit of a turn after which the agent is taken to block its event loop."""


class Message(TypedDict):
    """The text of one turn."""

    role: Literal["assistant", "tool"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """The turns of one response so far; the last message is the model's."""

    prompt: str
    """The rendered prompt, special tokens included."""
    messages: list[Message]


class ToolAgent(Protocol):
    """Answers the model. One object serves all conversations of a rank, many of them at a time."""

    async def step(self, conversation: Conversation) -> str | None:
        """Return the answer of a tool or user to the last message; None ends the response."""


class AgentRunner:
    """Calls an agent for many conversations at once, in an event loop in a thread of its own."""

    def __init__(self, agent: ToolAgent, *, name: str, timeout_s: float) -> None:
        """``timeout_s``: of one call; after it the model gets an error message as the answer.
        ``name``: of the agent, for messages.
        """
        self._agent = agent
        self._name = name
        self._timeout_s = timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """Return one answer per conversation, in their order.

        Raises UserError when the agent raises, returns anything but a text or None, or blocks its
        event loop; StopRequested at once, however long its answers take.
        """
        if not conversations:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agent", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(self._answer_all(conversations), self._loop)
        try:
            return _result(future, self._timeout_s + LOOP_SLACK_S)
        except StopRequested:
            future.cancel()
            raise
        except FutureTimeout as e:
            future.cancel()
            raise UserError(
                f"the agent {self._name} blocks its event loop for more than "
                f"{self._timeout_s + LOOP_SLACK_S:g} s: "
                "await what takes long, or run it with asyncio.to_thread"
            ) from e

    def close(self) -> None:
        """End the event loop."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop = None

    async def _answer_all(self, conversations: Sequence[Conversation]) -> list[str | None]:
        answers = await asyncio.gather(*[self._answer_one(c) for c in conversations])
        return list(answers)

    async def _answer_one(self, conversation: Conversation) -> str | None:
        try:
            answer = await asyncio.wait_for(self._agent.step(conversation), self._timeout_s)
        except TimeoutError:
            return f"error: no answer within {self._timeout_s:g} s"
        except Exception as e:
            turn = conversation.messages[-1]["content"][:80]
            raise UserError(
                f"the agent {self._name} raised {describe_exception(e)}, for the turn {turn!r}"
            ) from e
        if answer is not None and not isinstance(answer, str):
            raise UserError(
                f"the agent {self._name} returned {type(answer).__name__}; {KEY}.agent: return a "
                "text, or None when the response is done"
            )
        return answer


def _result(future: Future[list[str | None]], timeout_s: float) -> list[str | None]:
    """The result of ``future``. Raises FutureTimeout after ``timeout_s``, and StopRequested."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return future.result(min(signals.POLL_S, max(0.0, deadline - time.monotonic())))
        except FutureTimeout:
            if future.done() or time.monotonic() >= deadline:
                raise
        signals.check()
