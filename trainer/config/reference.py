"""``python -m trainer.config.reference`` writes docs/config.md: every key, its values, default and
meaning; and the tables of docs/coming-from.md.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator

from trainer.config.keys.conf_tree import conf_dir, config_groups
from trainer.config.keys.describe import describe
from trainer.config.keys.fields import fields, may_change_keys, setting_keys
from trainer.config.keys.tree import known_keys
from trainer.config.schema import Config
from trainer.config.verl import page as verl_page

HEAD = """\
# All settings

Written by `python -m trainer.config.reference` from `conf/config.yaml` (defaults) and
`trainer/config/schema` (types, meaning). Type `KEY=VALUE` after `python -m trainer`; `${...}` as a
default means that the key follows another one. Names are verl's; what becomes of verl's other
settings is in [coming-from.md](coming-from.md). A setting that others leave without effect
(`over_sampling` with `trainer.mode=sft`) is an error; what snippets for verl carry along, or a
sweep over the switch (`kl_loss_coef` where `use_kl_loss=false`), gives a hint at the start.
"""
TABLE = "| key | values | default | meaning |\n|---|---|---|---|\n"
MAY_CHANGE = """\
## What a started run may change

All else must be as it was when the run began; a difference is an error that names the key and both
values.

"""


def page() -> str:
    """The whole page, in Markdown."""
    groups = sorted(config_groups([conf_dir()]).items())
    parts = [HEAD, *(_table(section) for section in Config.model_fields)]
    parts.append(
        "## Groups\n\n"
        + _lines(
            f"- `{group}=` {', '.join(names)}"
            for group, names in groups
            if not group.startswith("hydra")
        )
    )
    parts.append(MAY_CHANGE + _lines(f"- `{key}`" for key in may_change_keys()))
    return "\n".join(parts)


def _lines(lines: Iterable[str]) -> str:
    return "".join(f"{line}\n" for line in lines)


def _table(section: str) -> str:
    return f"## {section}\n\n{TABLE}{_lines(_rows(section))}"


def _rows(section: str) -> Iterator[str]:
    for key in setting_keys():
        if not key.startswith(f"{section}."):
            continue
        field = fields()[key]
        values = describe(field.annotation, field.metadata).replace("|", "\\|")
        meaning = (field.description or "").replace("\n", " ").replace("``", "`")
        meaning = meaning.replace("|", "\\|")
        yield f"| `{key}` | {values} | `{known_keys()[key]}` | {meaning} |"


def coming_from(old: str) -> str:
    """docs/coming-from.md with its tables written anew; ``old``: the page as it is."""
    return old.partition(verl_page.BEGIN)[0] + verl_page.tables()


if __name__ == "__main__":
    docs = conf_dir().parent / "docs"
    coming = docs / "coming-from.md"
    coming.write_text(coming_from(coming.read_text(encoding="utf-8")), encoding="utf-8")
    target = docs / "config.md"
    target.write_text(page(), encoding="utf-8")
    sys.stdout.write(f"wrote {target} and {coming}\n")
