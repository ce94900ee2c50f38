"""``python -m trainer.export RUN_OR_CHECKPOINT --out DIR``: a checkpoint's weights as a Hugging
Face folder.

Reads a checkpoint of any ZeRO stage and any number of ranks, in one process, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.base.command import run_command
from trainer.base.errors import EXIT_OK, UserError, first_line

# torch and transformers take seconds: imported by the functions, so that Ctrl-C is heard meanwhile
if TYPE_CHECKING:
    import torch

    from trainer.checkpoint.store import manifest

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def export(source: Path, out: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the weights of ``source`` (a run folder: its newest whole checkpoint; or a folder
    ``step_N``), the model's config and its tokenizer to ``out``; returns the checkpoint's folder.
    ``dtype``: default the run's own. Of LoRA: the merged weights, and the adapters in
    ``out/adapter``.

    Raises UserError when there is no whole checkpoint, when a file of it can't be read, and when
    ``out`` holds something already.
    """
    import torch

    from trainer.checkpoint.reader import CheckpointReader
    from trainer.checkpoint.restore import load_states
    from trainer.checkpoint.store.manifest import unreadable
    from trainer.config.frozen import load_frozen
    from trainer.models import load_model
    from trainer.models.adapters import adapters_of, adapters_state, require_same_base
    from trainer.models.huggingface import write_folder

    try:
        folder, saved = _checkpoint(source)
    except OSError as error:
        raise UserError(str(unreadable(error))) from error
    _require_new_folder(out)
    config = load_frozen(folder.parent.parent)
    actor = config.actor_rollout_ref
    if actor.model.path is None:
        raise UserError(f"{folder.parent.parent}/config.yaml names no actor_rollout_ref.model.path")
    own = "bf16" if actor.actor.mixed_precision == "bf16" else "fp32"
    wanted = dtype or getattr(torch, DTYPES[own])
    model = load_model(actor.model.path, dtype=wanted, device="cpu", adapters=adapters_of(config))
    reader = CheckpointReader(folder, saved)
    if model.has_adapters:
        states = load_states(folder, saved, 0, saved.world_size).global_state
        require_same_base(adapters_state(config, model), states["adapters"])
    with torch.no_grad():
        for name, tensor in _tensors(model.model):
            if reader.shapes.get(name) != tuple(tensor.shape):
                raise UserError(
                    f"{folder} holds another model than {actor.model.path}: {name} differs"
                )
            if tensor.requires_grad or not model.has_adapters:
                tensor.copy_(reader.read_weight(name))
    write_folder(model.model, model.tokenizer, out)
    return folder


def _require_new_folder(out: Path) -> None:
    """Raises UserError, before minutes of reading, unless ``out`` can be made or is empty."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        full = any(out.iterdir())
    except (OSError, ValueError) as error:
        raise UserError(
            f"--out {out} can't be made ({first_line(error)}); give a new folder where you may "
            "write"
        ) from error
    if full:
        raise UserError(f"--out {out} is not empty; give a new folder")
    if not os.access(out, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} can't be written to; give a new folder where you may write")


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    skip = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in model.named_modules()
        for name in child._non_persistent_buffers_set
    }
    return [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n not in skip)]


def _checkpoint(source: Path) -> tuple[Path, manifest.Manifest]:
    from trainer.checkpoint.store import layout, manifest
    from trainer.checkpoint.store.manifest import DamagedError

    source = Path(os.path.abspath(source))
    if (source / manifest.NAME).exists():
        try:
            saved = manifest.read(source)
        except DamagedError as error:
            raise UserError(
                f"{source} is damaged: {error}; give an older checkpoint of the run"
            ) from error
        problems = manifest.problems(source, saved)
        if problems:
            raise UserError(
                f"{source} is damaged: {'; '.join(problems)}; give an older checkpoint of the run"
            )
        return source, saved
    newest = layout.newest_whole(source / layout.FOLDER)
    if newest is None:
        raise UserError(
            f"{source} is neither a checkpoint nor a run with a whole one; give a run folder or a "
            "step_N"
        )
    return newest


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    return run_command(lambda: _run(argv))


def _run(argv: Sequence[str] | None) -> int:
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument(
        "source", type=Path, help="run folder, or a checkpoint RUN/checkpoints/step_N"
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: what the run trained in")
    args = parser.parse_args(argv)
    import torch

    dtype = None
    if args.dtype is not None:
        dtype = getattr(torch, DTYPES[args.dtype])
    folder = export(args.source, args.out, dtype=dtype)
    sys.stdout.write(f"{args.out} holds the model of {folder}\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
