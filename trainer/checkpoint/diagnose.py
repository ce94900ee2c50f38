"""What a folder is that was given for a checkpoint and is none: said with what to type instead."""

from __future__ import annotations

import re
from pathlib import Path

from trainer.checkpoint.store import commit, manifest

WEIGHTS = "give its weights as a Hugging Face folder to actor_rollout_ref.model.path, without trainer.resume_from_path"


def what_is(folder: Path) -> str | None:
    """One sentence without a full stop; None for what looks like a checkpoint of ours, or like
    nothing known.
    """
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is a file; give the folder step_N"
    for root in (folder / commit.FOLDER, folder):
        if steps := commit.steps_on_disk(root):
            return (
                f"it holds checkpoints; give one of them, such as {commit.step_dir(root, steps[0])}"
            )
    if (folder / manifest.NAME).exists():
        return None
    names = {path.name for path in folder.iterdir()}
    if "config.json" in names and any(name.endswith((".safetensors", ".bin")) for name in names):
        return "it is a model; set actor_rollout_ref.model.path to it, without trainer.resume_from_path"
    if "latest_checkpointed_iteration.txt" in names or any(
        re.fullmatch(r"global_step_\d+", name) for name in names
    ):
        return f"it is a checkpoint of verl; {WEIGHTS}"
    if ".metadata" in names:
        return f"it is a checkpoint of torch.distributed.checkpoint; {WEIGHTS}"
    if any(re.fullmatch(r"global_step\d+", name) for name in names) or any(
        n.endswith("_states.pt") for n in names
    ):
        return f"it is DeepSpeed's, without our {manifest.NAME}; {WEIGHTS}"
    return None
