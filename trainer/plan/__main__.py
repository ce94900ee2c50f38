"""``python -m trainer.plan``: print what a run would need."""

from __future__ import annotations

import sys
from typing import Any

from trainer.base.errors import UserError
from trainer.config.cli import complain
from trainer.plan.options import Words, split

HELP = """\
python -m trainer.plan [KEY=VALUE ...] [plan.KEY=VALUE ...]

Prints, before any GPU is touched: the batch algebra, the recommended token budget from your data, the memory of a rank
by part, the size of a checkpoint and its time against the grace period, and GPU-hours. KEY=VALUE as for
python -m trainer.

  python -m trainer.plan experiment=demo_grpo
  python -m trainer.plan experiment=math_7b actor_rollout_ref.model.path=FOLDER plan.step_time_s=90 plan.steps=200

plan.KEY
"""


def main(argv: list[str]) -> int:
    """The command line; the exit code."""
    if {"--help", "-h"} & set(argv):
        from dataclasses import fields

        rows = "".join(
            f"  plan.{f.name:<16}{f.metadata['help']} (default {f.default})\n"
            for f in fields(Words)
        )
        sys.stdout.write(HELP + rows)
        return 0
    from trainer.config.entry import compose_and

    try:
        words, rest = split(argv)
    except UserError as error:
        return complain(error)
    return compose_and(lambda settings: show(settings, words), rest, runs=False)


def show(settings: Any, words: Words) -> int:
    """Print the plan of composed settings. Raises UserError with every violation at once."""
    from trainer.config import load
    from trainer.config.checks.problems import as_error
    from trainer.plan import lengths, model, report

    config = load(settings, complete=False)
    path = config.actor_rollout_ref.model.path
    folder = model.folder_of(path) if path else None
    shape = model.shape_of(folder) if folder else None
    sizes = report.sizes_with(config, words, shape)
    measured = None
    if config.data.train_files is not None:
        tokenizer = (
            folder / "tokenizer.json" if folder and (folder / "tokenizer.json").is_file() else None
        )
        keys = config.data
        measured = lengths.measure(
            config.data.train_files, keys.prompt_key, keys.response_key, tokenizer
        )
    try:
        sys.stdout.write(report.report(config, words, sizes, shape, measured))
    except ValueError as error:
        raise as_error(str(error).splitlines()) from None
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
