"""``python -m trainer.export RUN_OR_CHECKPOINT --out DIR``: a checkpoint's weights as a Hugging
Face folder.

Reads a checkpoint of any ZeRO stage and any number of ranks, in one process, without a GPU.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase

from trainer.base.errors import EXIT_OK, EXIT_USER, UserError
from trainer.checkpoint.restore import Saved, load_states
from trainer.checkpoint.store import commit, manifest
from trainer.checkpoint.store.manifest import Damaged
from trainer.config.frozen import load_frozen
from trainer.models import load_model
from trainer.models.adapters import adapters_of, adapters_state, require_same_base
from trainer.models.lora import has_adapters, weights, write_adapter

ADAPTER = "adapter"
"""Not in the folder itself: transformers would add the adapter to the weights that hold it
already.
"""
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def export(source: Path, out: Path, *, dtype: torch.dtype | None = None) -> Path:
    """Write the weights of ``source`` (a run folder: its newest whole checkpoint; or a folder
    ``step_N``), the model's config and its tokenizer to ``out``; returns the checkpoint's folder.
    ``dtype``: default the run's own. Of LoRA: the merged weights, and the adapters in
    ``out/adapter``.

    Raises UserError when there is no whole checkpoint, or ``out`` holds something already.
    """
    folder, found = _checkpoint(source)
    if out.exists() and any(out.iterdir()):
        raise UserError(f"--out {out} is not empty; give a new folder")
    config = load_frozen(folder.parent.parent)
    actor = config.actor_rollout_ref
    if actor.model.path is None:
        raise UserError(f"{folder.parent.parent}/config.yaml names no actor_rollout_ref.model.path")
    wanted = dtype or DTYPES["bf16" if actor.actor.mixed_precision == "bf16" else "fp32"]
    model = load_model(actor.model.path, dtype=wanted, device="cpu", adapters=adapters_of(config))
    saved = Saved(folder, found)
    if model.frozen is not None:
        states = load_states(folder, found, 0, found.world_size).global_state
        require_same_base(adapters_state(config, model), states["adapters"])
    with torch.no_grad():
        for name, tensor in _tensors(model.model):
            if saved.shapes.get(name) != tuple(tensor.shape):
                raise UserError(
                    f"{folder} holds another model than {actor.model.path}: {name} differs"
                )
            if tensor.requires_grad or model.frozen is None:
                tensor.copy_(saved.full(name))
    write_folder(model.model, model.tokenizer, out)
    return folder


def write_folder(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """The folder that transformers and vLLM read, instead of what an earlier attempt left there. It
    appears whole. Adapters are merged into the weights, and lie beside them in a folder of their
    own.
    """
    temp = out.with_name(f".{out.name}.tmp")
    for old in (temp, out):
        if old.exists():
            shutil.rmtree(old)
    temp.mkdir(mode=0o700, parents=True)
    state = None
    if has_adapters(model):
        state = {weight.name: weight.merged() for weight in weights(model)}
        write_adapter(model, temp / ADAPTER)
    model.save_pretrained(temp, state_dict=state)  # type: ignore[operator]
    tokenizer.save_pretrained(temp)
    temp.rename(out)


def _tensors(model: torch.nn.Module) -> list[tuple[str, torch.Tensor]]:
    skip = {
        f"{prefix}.{name}" if prefix else name
        for prefix, child in model.named_modules()
        for name in child._non_persistent_buffers_set
    }
    return [*model.named_parameters(), *((n, b) for n, b in model.named_buffers() if n not in skip)]


def _checkpoint(source: Path) -> tuple[Path, manifest.Manifest]:
    source = Path(os.path.abspath(source))
    if (source / manifest.NAME).exists():
        try:
            found = manifest.read(source)
        except Damaged as error:
            raise UserError(
                f"{source} is damaged: {error}; give an older checkpoint of the run"
            ) from error
        if wrong := manifest.problems(source, found):
            raise UserError(
                f"{source} is damaged: {'; '.join(wrong)}; give an older checkpoint of the run"
            )
        return source, found
    newest = commit.newest_whole(source / commit.FOLDER)
    if newest is None:
        raise UserError(
            f"{source} is neither a checkpoint nor a run with a whole one; give a run folder or a "
            "step_N"
        )
    return newest


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m trainer.export", description=__doc__)
    parser.add_argument(
        "source", type=Path, help="run folder, or a checkpoint RUN/checkpoints/step_N"
    )
    parser.add_argument("--out", type=Path, required=True, help="new folder")
    parser.add_argument("--dtype", choices=sorted(DTYPES), help="default: what the run trained in")
    args = parser.parse_args(argv)
    try:
        folder = export(args.source, args.out, dtype=DTYPES.get(args.dtype))
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return EXIT_USER
    sys.stdout.write(f"{args.out} holds the model of {folder}\n")
    return EXIT_OK


if __name__ == "__main__":
    sys.exit(main())
