"""Agents: who answers the model between two of its turns, and how their calls are bounded."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import Literal, Protocol, TypedDict

from trainer.base.errors import UserError
from trainer.base.user_code import raised_where
from trainer.rollout.settings import KEY

LOOP_SLACK_S = 30.0
"""How much longer than a turn's own limit the whole round may last before the agent is taken to
block.
"""


class Message(TypedDict):
    """One turn."""

    role: Literal["assistant", "tool"]
    content: str


@dataclass(frozen=True, kw_only=True)
class Conversation:
    """What was said in one response so far; the last message is the model's."""

    prompt: str
    """The rendered prompt, special tokens included."""
    messages: list[Message]


class Agent(Protocol):
    """Answers the model. One object serves all conversations of a rank, many at a time."""

    async def step(self, conversation: Conversation) -> str | None:
        """What a tool (or another speaker) says to the last message, or None: the response is
        done.
        """


class AgentRunner:
    """Calls an agent for many conversations at once, in an event loop of its own, each within
    ``timeout_s`` seconds.

    A call that takes longer is given up and the model is told so. ``name`` stands in messages.
    """

    def __init__(self, agent: Agent, *, name: str, timeout_s: float) -> None:
        self._agent, self._name, self._timeout_s = agent, name, timeout_s
        self._loop: asyncio.AbstractEventLoop | None = None

    def answer(self, conversations: Sequence[Conversation]) -> list[str | None]:
        """One answer per conversation, in order.

        Raises UserError when the agent raises, returns anything but a text or None, or blocks its
        event loop.
        """
        if not conversations:
            return []
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            threading.Thread(target=self._loop.run_forever, name="agent", daemon=True).start()
        future = asyncio.run_coroutine_threadsafe(self._all(conversations), self._loop)
        try:
            return future.result(self._timeout_s + LOOP_SLACK_S)
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

    async def _all(self, conversations: Sequence[Conversation]) -> list[str | None]:
        return list(await asyncio.gather(*map(self._one, conversations)))

    async def _one(self, conversation: Conversation) -> str | None:
        try:
            answer = await asyncio.wait_for(self._agent.step(conversation), self._timeout_s)
        except TimeoutError:
            return f"error: no answer within {self._timeout_s:g} s"
        except Exception as e:
            said = conversation.messages[-1]["content"][:80]
            raise UserError(
                f"the agent {self._name} raised {raised_where(e)}, for the turn {said!r}"
            ) from e
        if answer is not None and not isinstance(answer, str):
            raise UserError(
                f"the agent {self._name} returned {type(answer).__name__}; {KEY}.agent: return a "
                "text, or None when "
                "the response is done"
            )
        return answer
