"""What a folder is that was given as a checkpoint and is none, and what to type instead."""

from __future__ import annotations

from pathlib import Path

from trainer.base.foreign import program_of
from trainer.checkpoint.store import layout, manifest

USE_ITS_WEIGHTS = (
    "give its weights as a Hugging Face folder to actor_rollout_ref.model.path, without "
    "trainer.resume_from_path"
)


def diagnose(folder: Path) -> str | None:
    """What ``folder`` is instead of a checkpoint: a part of a sentence, without a full stop.

    None for what looks like one of our checkpoints, and for what isn't recognized.
    """
    if not folder.exists():
        return "there is no such folder"
    if not folder.is_dir():
        return "it is a file; give the folder step_N"
    for root in (folder / layout.FOLDER, folder):
        steps = layout.steps_on_disk(root)
        if steps:
            newest = layout.step_dir(root, steps[0])
            return f"it holds checkpoints; give one of them, such as {newest}"
    if (folder / manifest.NAME).exists():
        return None
    return _other_program({path.name for path in folder.iterdir()})


def _other_program(names: set[str]) -> str | None:
    """Recognize the folder of another program by the ``names`` in it."""
    has_weights = any(name.endswith((".safetensors", ".bin")) for name in names)
    if "config.json" in names and has_weights:
        return (
            "it is a model; set actor_rollout_ref.model.path to it, without "
            "trainer.resume_from_path"
        )
    program = program_of(names)
    if program == "DeepSpeed":
        return f"it is DeepSpeed's, without our {manifest.NAME}; {USE_ITS_WEIGHTS}"
    if program is not None:
        return f"it is a checkpoint of {program}; {USE_ITS_WEIGHTS}"
    return None
