"""The key tree: file, types and documentation say the same."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.config.helpers import REPO, minimal_settings
from trainer.config import load, reference
from trainer.config.keys import verl
from trainer.config.keys.fields import fields, marked, setting_keys
from trainer.config.keys.tree import is_known, known_keys
from trainer.config.schema.markers import NoEffect


def test_file_and_schema_have_the_same_keys_in_the_same_groups():
    assert set(setting_keys()) == set(known_keys())


def test_schema_has_no_defaults_of_its_own():
    assert [key for key in setting_keys() if not fields()[key].is_required()] == []


def test_every_key_says_what_it_is():
    assert [key for key in setting_keys() if not fields()[key].description] == []


def test_reference_page_is_in_step():
    # It lists every key with its default: a key that goes or changes its name breaks people's
    # command lines. Look at the difference before you write the page anew.
    assert (REPO / "docs" / "config.md").read_text() == reference.page(), (
        "run python -m trainer.config.reference"
    )


def test_settings_cannot_be_changed():
    config = load(minimal_settings())
    with pytest.raises(ValidationError):
        config.data.seed = 3


def test_tables_speak_of_keys_that_exist():
    assert [key for key in verl.ALIASES.values() if key not in known_keys()] == []
    assert [key for key in verl.ALIASES if is_known(key)] == []
    assert [key for key in verl.UNSUPPORTED if is_known(key)] == []
    assert [key for key, _ in verl.UNSUPPORTED_VALUES if key not in known_keys()] == []


CONDITIONS = {
    (key, value) for _, rule in marked(NoEffect) for key in [rule.switch] for value in rule.values
} | {condition for _, rule in marked(NoEffect) for condition in rule.and_also.items()}


@pytest.mark.parametrize(("key", "value"), sorted(CONDITIONS, key=str))
def test_what_leaves_keys_without_effect_are_values_that_exist(key: str, value: object):
    field = fields()[key]
    TypeAdapter(Annotated[field.annotation, field]).validate_python(value)


@pytest.mark.parametrize("key", sorted(verl.REDUNDANT))
def test_redundant_keys_have_a_reason_for_other_values(key: str):
    assert verl.unsupported_reason(key)
