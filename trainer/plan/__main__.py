"""``python -m trainer.plan``: print what a run would need."""

from __future__ import annotations

import sys
from typing import Any

from trainer.base.command import run_command

HELP = """\
python -m trainer.plan [KEY=VALUE ...] [plan.KEY=VALUE ...]

Prints, before any GPU is touched: the batch algebra, the recommended token
budget from your data, the memory of a rank by part, the size of a checkpoint
and its time against the grace period, and GPU-hours. KEY=VALUE as for
python -m trainer.

  python -m trainer.plan experiment=demo_grpo
  python -m trainer.plan experiment=math_7b plan.steps=200 \\
      actor_rollout_ref.model.path=FOLDER

plan.KEY
"""


def main(argv: list[str]) -> int:
    """Print the plan or the help text; the exit code. A UserError is printed as one message."""
    from trainer.config.cli import print_error
    from trainer.plan.options import PlanOptions, split_options

    if {"--help", "-h"} & set(argv):
        from dataclasses import fields

        rows = "".join(
            f"  plan.{f.name:<15}{f.metadata['help']} (default {f.default})\n"
            for f in fields(PlanOptions)
        )
        sys.stdout.write(HELP + rows)
        return 0
    from trainer.base.errors import UserError
    from trainer.config.entry import compose_and_call

    try:
        options, rest = split_options(argv)
    except UserError as error:
        return print_error(error)
    return compose_and_call(lambda settings: show(settings, options), rest, starts_run=False)


def show(settings: Any, options: Any) -> int:
    """Print the plan of composed settings; ``options``: PlanOptions. Raises UserError with every
    violation at once.
    """
    from trainer.base.model_shape import ModelShape
    from trainer.config import load
    from trainer.config.checks.problems import SettingsError
    from trainer.plan import lengths, model, report

    config = load(settings, complete=False)
    path = config.actor_rollout_ref.model.path
    folder = model.folder_of(path) if path else None
    shape = ModelShape.from_folder(folder) if folder else None
    critic = model.critic_shape(config)
    sizes = report.sizes_of(config, options, shape)
    measured = None
    data = config.data
    if data.train_files is not None:
        tokenizer = folder / "tokenizer.json" if folder else None
        if tokenizer and not tokenizer.is_file():
            tokenizer = None
        measured = lengths.measure(data.train_files, data.prompt_key, data.response_key, tokenizer)
    try:
        sys.stdout.write(report.report(config, options, sizes, shape, measured, critic))
    except ValueError as error:
        raise SettingsError(str(error).splitlines()) from None
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(sys.argv[1:])))
