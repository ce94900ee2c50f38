"""``python -m trainer``: compose the settings, check them, freeze them, run."""

from __future__ import annotations

import sys
from typing import Any

from trainer.base.command import run_command
from trainer.base.errors import UserError


def main() -> int:
    """Run the command line. Returns the exit code."""
    from trainer.config.cli import help_text

    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(help_text())
        return 0
    from trainer.config.entry import compose_and_call  # imports Hydra

    return compose_and_call(run_on_this_machine, sys.argv[1:])


def run_on_this_machine(settings: Any) -> int:
    """Start the ranks of one run and wait for them; ``settings`` as Hydra composed them. Returns
    the exit code.

    Raises UserError for settings that contradict each other, that need more than this machine, or
    that differ from those of the run in the same folder, and for a folder whose run lives.
    """
    from jobs.ownership import living_owners
    from trainer import launch
    from trainer.base import run_owner
    from trainer.config.frozen import freeze, run_dir_of
    from trainer.config.loading import load
    from trainer.launch import rollout_nodes

    config = load(settings)
    rollout_nodes.require(config)
    nodes = config.trainer.nnodes
    if nodes > 1:
        raise UserError(
            f"trainer.nnodes={nodes}, but python -m trainer runs on this machine alone: type "
            "python -m trainer -m ... for a job on Slurm, or trainer.nnodes=1"
        )
    run_dir = run_dir_of(config)
    owner = run_owner.new_owner(run_owner.new_launch(), run_owner.LOCAL)
    with run_owner.held(run_dir, owner, living_owners):
        freeze(config, run_dir)
        return launch.run(config, run_dir, ranks=config.trainer.n_gpus_per_node)


if __name__ == "__main__":
    sys.exit(run_command(main))
