"""A worker whose learning rate is multiplied at one step, or from one step on.

The environment variable ``PLIMSOLL_TEST_SABOTAGE`` is ``STEP:FACTOR`` or ``STEP-:FACTOR``; a factor
``nan`` makes NaN of the weights.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from trainer import worker
from trainer.config.schema import CriticOptim, Optim
from trainer.run import policy_update

SABOTAGE = "PLIMSOLL_TEST_SABOTAGE"


def main(run_dir: Path) -> int:
    steps, factor = os.environ[SABOTAGE].split(":")
    first = int(steps.rstrip("-"))
    scheduled_lr = policy_update.scheduled_lr

    def sabotaged_lr(optim: Optim | CriticOptim, step: int, run_steps: int) -> float:
        is_hit = step == first or (steps.endswith("-") and step > first)
        return scheduled_lr(optim, step, run_steps) * (float(factor) if is_hit else 1.0)

    policy_update.scheduled_lr = sabotaged_lr
    return worker.main(run_dir)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
