"""``python -m trainer.config.reference`` writes docs/config.md: every key, its values, default and
meaning.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

from pydantic import BaseModel

from trainer.config.frozen import MAY_CHANGE
from trainer.config.keys import tree as keys
from trainer.config.keys import verl
from trainer.config.keys.conf_tree import conf_dir, config_groups
from trainer.config.keys.describe import describe
from trainer.config.schema import Config

HEAD = """\
# All settings

Written by `python -m trainer.config.reference` from `conf/config.yaml` (defaults) and `trainer/config/schema` (types,
meaning). Type `KEY=VALUE` after `python -m trainer`; `${...}` as a default means that the key follows another one.
Names are verl's; a verl key that does nothing here is an error that says why. So is a setting of yours that others
leave without effect (`over_sampling` with `trainer.mode=sft`); what snippets for verl carry along, or a sweep over the
switch (`kl_loss_coef` where `use_kl_loss=false`), is told at the start of the run.
"""
TABLE = "| key | values | default | meaning |\n|---|---|---|---|\n"


def page() -> str:
    """The whole page."""
    parts = [HEAD]
    for name, field in Config.model_fields.items():
        assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        rows = "".join(
            f"| `{key}` | {values} | `{default}` | {text} |\n"
            for key, values, default, text in _rows(name)
        )
        parts.append(f"## {name}\n\n{TABLE}{rows}")
    groups = sorted(
        (g, names) for g, names in config_groups([conf_dir()]).items() if not g.startswith("hydra")
    )
    parts.append(
        "## Groups\n\n" + "".join(f"- `{group}=` {', '.join(names)}\n" for group, names in groups)
    )
    parts.append(
        "## What a started run may change\n\nAll else must be as it was when the run began; a "
        "difference is an error "
        "that names the key and both values.\n\n" + "".join(f"- `{key}`\n" for key in MAY_CHANGE)
    )
    parts.append(
        "## Other spellings\n\n"
        + "".join(f"- `{a}` is `{key}`\n" for a, key in verl.ALIASES.items())
    )
    parts.append(
        "## Keys of verl that are not supported\n\n| key | why, and what to use |\n|---|---|\n"
        + "".join(f"| `{key}` | {reason} |\n" for key, reason in verl.UNSUPPORTED.items())
    )
    return "\n".join(parts)


def _rows(prefix: str) -> Iterator[tuple[str, str, str, str]]:
    model: type[BaseModel] = Config
    for part in prefix.split("."):
        inner = model.model_fields[part].annotation
        assert isinstance(inner, type) and issubclass(inner, BaseModel)
        model = inner
    for name, field in model.model_fields.items():
        key = f"{prefix}.{name}"
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from _rows(key)
        else:
            meaning = (
                (field.description or "").replace("\n", " ").replace("``", "`").replace("|", "\\|")
            )
            values = describe(field.annotation, field.metadata).replace("|", "\\|")
            yield key, values, keys.known_keys()[key], meaning


if __name__ == "__main__":
    target = conf_dir().parent / "docs" / "config.md"
    target.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {target}\n")
