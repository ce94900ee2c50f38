"""The schema's field of every key and group of keys, and the markers that they carry."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TypeVar

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from trainer.config.schema import Config
from trainer.config.schema.markers import MayChange

_Marker = TypeVar("_Marker")


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section class of a group of keys; None for a key."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


@lru_cache(maxsize=1)
def fields() -> dict[str, FieldInfo]:
    """Dotted name of every group and key -> its field, in the order of the schema."""
    return dict(_fields(Config, ""))


def _fields(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        key = f"{prefix}{name}"
        yield key, field
        section = section_of(field)
        if section is not None:
            yield from _fields(section, f"{key}.")


def setting_keys() -> list[str]:
    """Dotted names of all keys, without the groups."""
    return [key for key, field in fields().items() if section_of(field) is None]


def marked(kind: type[_Marker]) -> Iterator[tuple[str, _Marker]]:
    """Every group and key that carries a marker of type ``kind``, with it."""
    for key, field in fields().items():
        for marker in field.metadata:
            if isinstance(marker, kind):
                yield key, marker


def may_change_keys() -> tuple[str, ...]:
    """Keys and groups of keys that a run may change when it resumes."""
    return tuple(key for key, _ in marked(MayChange))
