"""Checkpoints of other programs, recognized by the names of files. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from trainer.base.errors import UserError

_STEP = re.compile(r"step_\d+")


def program_of(names: Iterable[str]) -> str | None:
    """The program that writes checkpoints with these ``names`` in a folder; None for ours, and for
    what isn't recognized.
    """
    known = set(names)

    def has(pattern: str) -> bool:
        return any(re.fullmatch(pattern, name) for name in known)

    if "latest_checkpointed_iteration.txt" in known or has(r"global_step_\d+"):
        return "verl"
    if ".metadata" in known:
        return "torch.distributed.checkpoint"
    if has(r"global_step\d+") or has(r".*_states\.pt"):
        return "DeepSpeed"
    if "trainer_state.json" in known or has(r"checkpoint-\d+"):
        return "transformers"
    return None


def require_no_other_run(folder: Path) -> None:
    """Raise UserError when ``folder``, which is to become a run folder, holds checkpoints that a
    new run would not resume from: those of another program, or those inside a run.

    Raises OSError when the folder can't be read.
    """
    if not folder.is_dir():
        return
    names = sorted(path.name for path in folder.iterdir())
    program = program_of(names)
    if program is not None:
        signs = [name for name in names if program_of([name]) is not None]
        raise UserError(
            f"trainer.default_local_dir={folder} holds checkpoints of {program} "
            f"({', '.join(signs[:4])}), which can't be continued: a run there would begin at step "
            "0. Set trainer.default_local_dir to a new folder, and actor_rollout_ref.model.path to "
            "their weights as a Hugging Face folder"
        )
    if "manifest.json" in names and _STEP.fullmatch(folder.name):
        run = folder.parent.parent
    elif any(_STEP.fullmatch(name) for name in names) and "metrics.jsonl" not in names:
        run = folder.parent
    else:
        return
    raise UserError(
        f"trainer.default_local_dir={folder} is a folder of checkpoints inside a run: a run there "
        f"would begin at step 0. Type trainer.default_local_dir={run} to go on with that run"
    )
