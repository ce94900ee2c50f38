"""One rank of a run: reads the frozen config, joins the others, trains. ``python -m trainer.worker
RUN_DIR``.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from trainer.base import environment, quiet, signals
from trainer.base.errors import EXIT_USER
from trainer.launch import rollout_nodes


def main(run_dir: Path) -> int:
    """Run this process's rank of ``run_dir``; the exit code of the rank (0, 2, 85 or 1 for a
    crash).
    """
    signals.install()
    try:
        if (task := environment.rollout_task()) is not None:
            return rollout_nodes.run_task(run_dir, task)
        info = environment.rank_from_environment()
        environment.prepare(info.local_world_size)
        from trainer.config import load_frozen

        config = load_frozen(run_dir)
        rollout_nodes.require(config)
        quiet.before_imports(config.trainer.device)
        from trainer.run.loop import (
            train,
        )  # torch from here on: the environment above had to come first

        with rollout_nodes.held(config, run_dir, info):
            return train(config, run_dir, info)
    except Exception as error:
        from trainer.launch import report_error

        return report_error(error)


def leave_note(run_dir: Path, *, cause: str, step: int, attempt: int) -> None:
    """Tell the batch script outside the image why this attempt ended: ``exit.json``."""
    note = run_dir / "exit.json"
    temp = note.with_suffix(f".{os.getpid()}")
    temp.write_text(
        json.dumps({"cause": cause, "step": step, "attempt": attempt, "time": time.time()}) + "\n"
    )
    temp.replace(note)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.stderr.write(
            "usage: python -m trainer.worker RUN_DIR   (RUN_DIR holds the frozen config.yaml)\n"
        )
        sys.exit(EXIT_USER)
    sys.exit(main(Path(sys.argv[1])))
