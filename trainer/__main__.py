"""``python -m trainer``: compose the settings, check them, freeze them, run."""

from __future__ import annotations

import sys
from typing import Any

from trainer.base.errors import UserError
from trainer.config.cli import help_text


def main() -> int:
    """Run the command line; the exit code."""
    if {"--help", "-h"} & set(sys.argv[1:]):
        sys.stdout.write(help_text())
        return 0
    from trainer.config.entry import compose_and  # Hydra from here on

    return compose_and(run_one, sys.argv[1:])


def run_one(settings: Any) -> int:
    """One run: settings as Hydra composed them."""
    from trainer import launch
    from trainer.config import freeze, load, run_dir_of
    from trainer.launch import rollout_nodes

    config = load(settings)
    rollout_nodes.require(config)
    if (nodes := config.trainer.nnodes) > 1:
        raise UserError(
            f"trainer.nnodes={nodes}, but python -m trainer runs on this machine alone: type "
            "python -m trainer -m ... "
            "for a job on Slurm, or trainer.nnodes=1"
        )
    run_dir = run_dir_of(config)
    freeze(config, run_dir)
    return launch.run(config, run_dir, ranks=config.trainer.n_gpus_per_node)


if __name__ == "__main__":
    sys.exit(main())
