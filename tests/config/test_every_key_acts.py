"""People leave at the first setting that is silently ignored: every key is read by the code, or
refused.
"""

from __future__ import annotations

from typing import Any, Literal, get_args, get_origin

import pytest
from pydantic import BaseModel, create_model
from pydantic.fields import FieldInfo

from tests.config.helpers import REPO
from tests.config.section_reads import section_reads, sources_of, unread_keys
from trainer.config.keys.fields import setting_keys
from trainer.config.schema import Actor, ActorRolloutRef, Config
from trainer.config.schema.markers import NotBuilt


@pytest.fixture(scope="module")
def sources() -> dict[str, str]:
    return sources_of(REPO, "trainer", "jobs")


def is_answered(field: FieldInfo) -> bool:
    """Whether setting the key is answered without any reader: a run says at its start that the key
    does nothing, or the key has one value and others are refused.
    """
    if any(isinstance(marker, NotBuilt) for marker in field.metadata):
        return True
    return get_origin(field.annotation) is Literal and len(get_args(field.annotation)) == 1


def test_every_key_is_read_or_answered(sources: dict[str, str]):
    unread = unread_keys(sources)
    assert len(unread) < len(setting_keys()) / 10
    assert [key for key, field in unread.items() if not is_answered(field)] == [], (
        "nothing reads these keys: read them on a section whose class is annotated, or refuse them"
    )


def schema_with(**actor_keys: Any) -> type[BaseModel]:
    """The schema with more keys in ``actor_rollout_ref.actor``."""
    actor: Any = create_model("Actor", __base__=Actor, **actor_keys)
    ref: Any = create_model("ActorRolloutRef", __base__=ActorRolloutRef, actor=(actor, ...))
    return create_model("Config", __base__=Config, actor_rollout_ref=(ref, ...))


INVENTED = [
    "invented_scale",  # nowhere in the code
    "temperature",  # a key of rollout, read as rollout.temperature
    "tokens",  # an attribute of many other classes
    "trainer",  # a section that everybody reads
]


def test_invented_keys_are_caught(sources: dict[str, str]):
    unread = unread_keys(sources, schema_with(**{name: (float, ...) for name in INVENTED}))
    caught = [key for key, field in unread.items() if not is_answered(field)]
    assert caught == [f"actor_rollout_ref.actor.{name}" for name in INVENTED]


HEAD = """
from dataclasses import dataclass
from trainer.config.schema import Config
from trainer.config.schema.actor import Actor
from trainer.config.schema.rollout import Rollout
"""
READS = [
    "def f(actor: Actor): return actor.clip_ratio",
    "def f(config: Config | None): return config.actor_rollout_ref.actor.clip_ratio",
    "def load() -> Config: ...\n"
    "def f(): actor = load().actor_rollout_ref.actor; print(actor.clip_ratio)",
    "def f(config: Config):\n ref = config.actor_rollout_ref\n"
    " for name, section in (('ref', ref.ref), ('actor', ref.actor)): section.clip_ratio",
    "@dataclass\nclass C:\n config: Config\n"
    "def f(c: C): return [x.actor_rollout_ref.actor.clip_ratio for x in [c.config] if x]",
    "class C:\n def __init__(self, actor: Actor): self._actor = actor\n"
    " def f(self): return lambda: self._actor.clip_ratio",
    "def f(actor: Actor): return getattr(actor, 'clip_ratio')",
    "def f(actor: Actor): return dict(**actor.model_dump())",
]
NO_READS = [
    "'clip_ratio'  # clip_ratio",
    "def f(actor): return actor.clip_ratio",
    "def f(rollout: Rollout): return rollout.clip_ratio",
    "def f(actor: Actor): actor.clip_ratio = 1",
    "def f(actor: Actor): return actor.model_dump()",
    "class Actor: clip_ratio: float\ndef f(actor: Actor): return actor.clip_ratio",
]


@pytest.mark.parametrize(
    ("text", "is_read"), [(text, True) for text in READS] + [(text, False) for text in NO_READS]
)
def test_what_counts_as_a_read(text: str, is_read: bool):
    assert (("Actor", "clip_ratio") in section_reads({"example": HEAD + text})) == is_read
