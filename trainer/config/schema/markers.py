"""What a key declares beside its type, as metadata of its annotation.

``budget: Annotated[Count, MAY_CHANGE]``. ``trainer.config.keys.fields`` finds the markers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass(frozen=True)
class MayChange:
    """A resumed run may change the key, or all keys of the group: it does not alter what is learnt
    from a sample, or it says how long to go on.
    """


@dataclass(frozen=True)
class LocalPath:
    """A path, or a list of them, that the run folder's ``config.yaml`` holds as an absolute one."""


@dataclass(frozen=True)
class UserFile:
    """The path of a file of the user that acts on what is learnt: a run keeps the copy that it was
    started with (``trainer.config.user_files``).
    """

    code: bool
    """Python, with the modules beside it that it imports. False: a text, which may stand in the
    key itself instead of a path.
    """


@dataclass(frozen=True)
class NotBuilt:
    """Nothing reads the key yet; a run that sets it gets a hint at its start."""


@dataclass(frozen=True)
class ReadBy:
    """Only these generation engines (``actor_rollout_ref.rollout.name``) read the key; setting it
    for another one is an error.
    """

    engines: tuple[str, ...]


@dataclass(frozen=True)
class NoEffect:
    """Nothing reads the key while the key ``switch`` has one of ``values``."""

    switch: str
    values: tuple[Any, ...]
    reason: str
    """Rest of the message after ``switch=value``: why, and what to set."""
    refused: bool = False
    """Setting the key is an error then; otherwise it gives a hint at the start of the run, because
    snippets for verl or a sweep over the switch carry the key along.
    """
    and_also: Mapping[str, Any] = field(default_factory=dict)
    """Further keys -> the value that they must have as well."""
    harmless: tuple[Any, ...] = ()
    """Values other than the default that ask for what happens anyway: no message."""

    def allowing(self, *values: Any) -> NoEffect:
        """The same rule for a key to which ``values`` are ``harmless``."""
        return replace(self, harmless=values)


MAY_CHANGE = MayChange()
LOCAL_PATH = LocalPath()
USER_CODE = UserFile(code=True)
USER_TEXT = UserFile(code=False)
NOT_BUILT = NotBuilt()
READ_BY_VLLM = ReadBy(("vllm", "vllm_server"))
READ_BY_SERVER = ReadBy(("vllm_server",))
RL_ONLY = NoEffect(
    "trainer.mode",
    ("sft",),
    "learns from the responses in the data: set it to rl",
    refused=True,
)
