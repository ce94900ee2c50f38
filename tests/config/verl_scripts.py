"""verl's example scripts through the command line, and the table of them in docs/coming-from.md.

``python -m tests.config.verl_scripts FILE`` writes that table. FILE has a JSON object a line:
``script``, ``text_on_fsdp``, ``overrides`` (pairs of key and value, null for a shell variable).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir

from tests.config.helpers import REPO
from trainer.config import load
from trainer.config.checks.problems import SettingsError
from trainer.config.keys.conf_tree import conf_dir
from trainer.config.keys.tree import is_known
from trainer.config.overrides import check_overrides
from trainer.config.verl import page as verl_page
from trainer.config.verl.names import our_name

PAGE = REPO / "docs/coming-from.md"
BEGIN = "| script | composes | what it asks for that isn't there |\n"
OWN = {
    "data.train_files": "train.parquet",
    "data.val_files": "val.parquet",
    "actor_rollout_ref.model.path": "MODEL",
}
"""Settings that whoever takes over a script replaces."""
SHELL_VALUES = {
    "actor_rollout_ref.rollout.n": "8",
    "actor_rollout_ref.rollout.name": "vllm",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
    "data.train_batch_size": "256",
    "actor_rollout_ref.actor.ppo_mini_batch_size": "64",
}
"""Values for settings that a script takes from a shell variable. Other settings of ours are left
out; those that only verl has are asked for with some value.
"""


@dataclass(frozen=True)
class Outcome:
    """What becomes of a script."""

    script: str
    problems: Sequence[str]


def read_scripts(path: Path) -> list[dict[str, Any]]:
    """The scripts that train a text model with FSDP."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in rows if row["text_on_fsdp"]]


def command_line(row: Mapping[str, Any]) -> list[str]:
    """A script's settings as words, with data and model of one's own."""
    words = []
    for key, value in row["overrides"]:
        if value is None or "$" in value:
            value = SHELL_VALUES.get(key)
            if value is None and not is_known(our_name(key)):
                value = "VALUE"
        if value is not None and key not in OWN:
            words.append(f"{key}={value}")
    mode = ["trainer.mode=sft"] if "/sft/" in row["script"] else []
    return [*words, *(f"{key}={value}" for key, value in OWN.items()), *mode]


def outcome_of(row: Mapping[str, Any]) -> Outcome:
    """Compose and check a script's settings as ``python -m trainer`` does."""
    line = check_overrides(command_line(row))
    problems = list(line.problems)
    words = [word for word in line.argv if not word.startswith("hydra")]
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        settings = compose("config", words)
    try:
        load(settings)
    except SettingsError as error:
        problems += error.problems
    return Outcome(str(row["script"]), problems)


def table(path: Path) -> str:
    """The table of all scripts in ``path``, in Markdown."""
    outcomes = [outcome_of(row) for row in read_scripts(path)]
    composed = sum(not outcome.problems for outcome in outcomes)
    rows = [_row(outcome) for outcome in outcomes]
    total = f"{composed} of {len(outcomes)} compose; before these tables were made, none did."
    return "".join([BEGIN, "|---|---|---|\n", *rows, f"\n{total}\n"])


def _row(outcome: Outcome) -> str:
    asks = [problem.partition(";")[0].replace("|", "\\|") for problem in outcome.problems]
    composes = "no" if asks else "yes"
    return f"| {outcome.script.removeprefix('examples/')} | {composes} | {'; '.join(asks)} |\n"


def with_table(page: str, path: Path) -> str:
    """The page with the table of the scripts in ``path``, which stands before the other tables."""
    head, marker, tail = page.partition(verl_page.BEGIN)
    return head.partition(BEGIN)[0] + table(path) + "\n" + marker + tail


if __name__ == "__main__":
    PAGE.write_text(with_table(PAGE.read_text(encoding="utf-8"), Path(sys.argv[1])))
