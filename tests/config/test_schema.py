"""The key tree: file, types and documentation say the same."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, ValidationError

from tests.config.helpers import REPO, run_of
from trainer.config import Config, load, reference
from trainer.config.frozen import MAY_CHANGE
from trainer.config.keys import tree as keys
from trainer.config.keys import verl
from trainer.config.keys.describe import field_of

SNAPSHOT = Path(__file__).with_name("keys.txt")


def schema_keys(model: type[BaseModel] = Config, prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from schema_keys(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name


def test_file_and_schema_have_the_same_keys_in_the_same_groups():
    assert set(schema_keys()) == set(keys.known_keys())


def test_schema_has_no_defaults_of_its_own():
    assert [key for key in schema_keys() if not field_of(key).is_required()] == []


def test_every_key_says_what_it_is():
    assert [key for key in schema_keys() if not field_of(key).description] == []


def test_key_surface_is_as_users_know_it():
    # A key that goes or changes its name breaks people's command lines: change keys.txt knowingly.
    assert SNAPSHOT.read_text().splitlines() == [
        f"{key}={value}" for key, value in keys.known_keys().items()
    ]


def test_reference_page_is_in_step():
    assert (REPO / "docs" / "config.md").read_text() == reference.page(), (
        "run python -m trainer.config.reference"
    )


def test_settings_cannot_be_changed():
    config = load(run_of())
    with pytest.raises(ValidationError):
        config.data.seed = 3


def test_tables_speak_of_keys_that_exist():
    assert [key for key in MAY_CHANGE if not keys.is_known(key)] == []
    assert [key for key in verl.ALIASES.values() if key not in keys.known_keys()] == []
    assert [key for key in verl.ALIASES if keys.is_known(key)] == []
    assert [key for key in verl.UNSUPPORTED if keys.is_known(key)] == []
    assert [key for key, _ in verl.UNSUPPORTED_VALUES if key not in keys.known_keys()] == []


@pytest.mark.parametrize("key", sorted(verl.REDUNDANT))
def test_redundant_keys_have_a_reason_for_other_values(key: str):
    assert verl.reason_against(key)
