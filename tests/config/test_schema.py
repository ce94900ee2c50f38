"""The key tree: file, types and documentation say the same."""

from __future__ import annotations

from typing import Annotated

import pytest
from pydantic import TypeAdapter, ValidationError

from tests.config.helpers import REPO, minimal_settings
from trainer.config import load, reference
from trainer.config.keys.fields import fields, marked, setting_keys
from trainer.config.keys.tree import known_keys
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


CONDITIONS = {
    (key, value) for _, rule in marked(NoEffect) for key in [rule.switch] for value in rule.values
} | {condition for _, rule in marked(NoEffect) for condition in rule.and_also.items()}


@pytest.mark.parametrize(("key", "value"), sorted(CONDITIONS, key=str))
def test_what_leaves_keys_without_effect_are_values_that_exist(key: str, value: object):
    field = fields()[key]
    TypeAdapter(Annotated[field.annotation, field]).validate_python(value)
