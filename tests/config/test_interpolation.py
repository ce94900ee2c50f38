"""What is resolved without OmegaConf has the value that OmegaConf gives it."""

from __future__ import annotations

import random
from typing import Any

import pytest
from omegaconf import OmegaConf
from omegaconf.errors import ConfigTypeError

from tests.config.helpers import minimal_settings, put
from trainer.base.errors import UserError
from trainer.config import load
from trainer.config.keys import interpolation
from trainer.config.keys.fields import setting_keys
from trainer.config.loading import resolve_by_omegaconf

VALUES: list[Any] = [
    *[None, True, 0, -3, 1.5, "", "text", "null", [], [1, "2"], ["${trainer.seed}"], 10**30],
    *["${trainer.seed}", "${data.max_prompt_length}", "${actor_rollout_ref.actor.clip_ratio}"],
    *["a-${trainer.seed}-${trainer.project_name}", "${twice:${data.max_prompt_length}}"],
    *["${data}", "${data.train_files}", "${twice:${trainer.project_name}}", "$ {a}", "$x", "\\"],
    *["${oc.env:PLIMSOLL_SET}", "${oc.env:PLIMSOLL_UNSET,a/b.c}", "x${oc.env:PLIMSOLL_SET}"],
]


@pytest.mark.parametrize(
    "trees", [60, pytest.param(3000, marks=pytest.mark.exhaustive)], ids=["short", "long"]
)
def test_random_settings(trees: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PLIMSOLL_SET", "17")
    draw = random.Random(11)
    compared = 0
    for _ in range(trees):
        tree: dict[str, Any] = {}
        for key in draw.sample(setting_keys(), 4):
            put(tree, key, draw.choice(VALUES))
        whole = interpolation.merge(_defaults(), tree)
        try:
            ours = interpolation.resolve(whole)
        except interpolation.NotPlain:
            continue
        try:
            written, resolved = resolve_by_omegaconf(tree)
        except ConfigTypeError:
            # A list where a group belongs: OmegaConf doesn't name the key, the schema does.
            with pytest.raises(UserError, match=r"data\.apply_chat_template_kwargs"):
                load(put(minimal_settings(), "data.apply_chat_template_kwargs", []))
            continue
        assert repr(whole) == repr(written), tree
        assert repr(ours) == repr(resolved), tree
        compared += 1
    assert compared > trees / 2


def _defaults() -> dict[str, Any]:
    written, _ = resolve_by_omegaconf({})
    return written


@pytest.mark.parametrize(
    "text", ["${.seed}", "${a", "${no.such.key}", "${now:%Y}", "\\${a}", "$${trainer.seed}", "???"]
)
def test_other_forms_are_left_to_omegaconf(text: str) -> None:
    with pytest.raises(interpolation.NotPlain):
        interpolation.resolve({"trainer": {"seed": 1, "x": text}})


def test_a_circle_is_one_message() -> None:
    with pytest.raises(UserError, match="settings cannot be resolved"):
        load(minimal_settings(trainer__seed="${data.seed}", data__seed="${trainer.seed}"))


def test_lists_that_repeat_each_other_end() -> None:
    tree: dict[str, Any] = {"l0": list(range(10))}
    for level in range(1, 30):
        tree[f"l{level}"] = [f"${{l{level - 1}}}"] * 10
    with pytest.raises(UserError, match="more than 100000 values"):
        interpolation.resolve(tree)


def test_a_copy_is_not_shared() -> None:
    tree = {"a": {"b": [1, {"c": 2}]}}
    copied = interpolation.copy(OmegaConf.to_container(OmegaConf.create(tree)))
    assert copied == tree
    copied["a"]["b"][1]["c"] = 3
    assert tree == {"a": {"b": [1, {"c": 2}]}}
