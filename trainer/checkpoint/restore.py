"""Loading a checkpoint into a live engine of any number of ranks and any ZeRO stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.checkpoint.reader import CheckpointReader
from trainer.checkpoint.snapshot import state
from trainer.checkpoint.snapshot.fragments import (
    EXTRA,
    MASTER,
    STEP,
    WEIGHT,
    Fragment,
    dtype_name,
    fragments,
    full_shapes,
    zero_stage,
)
from trainer.checkpoint.store.manifest import DamagedError, Manifest

INDEX_0 = "state/index_0.json"
"""The index of rank 0, in the folder of each engine."""
_Shapes = Mapping[str, tuple[int, ...]]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a run resumes from, besides the weights and optimizer states in the engine.

    The caller sets random states last of all, since restoring may draw random numbers.
    """

    step: int
    folder: Path
    manifest: Manifest
    rank_state: dict[str, Any] | None
    """State of this rank; None when the number of ranks has changed."""
    rank_states: list[dict[str, Any]]
    """States of all ranks that wrote the checkpoint, by rank."""
    global_state: dict[str, Any]


def engine_reader(folder: Path, manifest: Manifest, name: str) -> CheckpointReader:
    """The tensors of the engine that a checkpoint holds in its folder ``name``; "" is the policy.

    Raises UserError when it holds no such engine, DamagedError and OSError as the reader does.
    """
    if name and not (folder / name / INDEX_0).is_file():
        raise UserError(
            f"{folder} holds no {name}: its run was trained without one. Set "
            "algorithm.adv_estimator to what that run had, or start anew with another "
            "trainer.experiment_name, from the exported model (python -m trainer.export)"
        )
    return CheckpointReader(folder / name, manifest)


def load_engine(
    ds: Any,
    reader: CheckpointReader,
    *,
    include_untrained: bool = True,
    model: str = "actor_rollout_ref.model",
) -> None:
    """Load this rank's weights, master copies, optimizer states and counters.

    ``include_untrained``: also weights that are not trained. ``model``: the settings that name the
    engine's model. Not collective. Raises UserError for a checkpoint of another model, DamagedError
    when a part can't be read.
    """
    require_same_model(full_shapes(ds), reader, model)
    live = fragments(ds, reader.optimizer_kinds, include_untrained=include_untrained)
    with torch.no_grad():
        for fragment in live:
            start = 0 if fragment.kind == STEP else fragment.start
            kind = _saved_kind(reader, fragment)
            reader.read_into(fragment.name, kind, start, fragment.tensor)
    for name, value in reader.counters.items():
        setattr(ds, name, value)


def gather_persistent_parameters(ds: Any) -> None:
    """Finish ``load_engine`` after it succeeded on every rank. Collective.

    Small weights stay gathered under ZeRO-3: gather them again from the loaded partitions.
    """
    if zero_stage(ds) != 3:
        return
    persistent = list(getattr(ds.optimizer, "persistent_parameters", []))
    if persistent:
        persistent[0].partition(persistent)
        persistent[0].all_gather(persistent)


def load_extra_tensors(extra_tensors: Mapping[str, Tensor], reader: CheckpointReader) -> list[str]:
    """Load the tensors that are not the engine's. Returns the names that were not saved.

    Raises DamagedError when a part can't be read.
    """
    missing = []
    with torch.no_grad():
        for name, tensor in extra_tensors.items():
            if reader.dtype(name, EXTRA) is None:
                missing.append(name)
            else:
                reader.read_into(name, EXTRA, 0, tensor.detach().view(-1))
    return missing


def load_states(folder: Path, manifest: Manifest, rank: int, world_size: int) -> Restored:
    """Read the states of the ranks and of the run.

    Raises DamagedError when one can't be decoded, OSError when its file can't be read.
    """
    try:
        rank_states = [
            state.decode((folder / f"state/rank_{saved_rank}.safetensors").read_bytes())
            for saved_rank in range(manifest.world_size)
        ]
        global_state = state.decode((folder / "state/global.safetensors").read_bytes())
    except ValueError as error:
        raise DamagedError(f"{folder.name}/state can't be read ({error})") from error
    return Restored(
        step=manifest.step,
        folder=folder,
        manifest=manifest,
        rank_state=rank_states[rank] if manifest.world_size == world_size else None,
        rank_states=rank_states,
        global_state=global_state,
    )


def require_same_model(
    live: _Shapes, reader: CheckpointReader, model: str = "actor_rollout_ref.model"
) -> None:
    """Raises UserError when the checkpoint is of a model with other parameters than ``live``.

    ``live``: name -> full shape of the engine's parameters and buffers. ``model``: the settings
    that name it.
    """
    saved = reader.shapes
    saved_rank = _lora_rank(saved)
    live_rank = _lora_rank(live)
    if saved_rank != live_rank:
        raise UserError(
            f"{reader.folder} was trained with {model}.lora_rank={saved_rank}, "
            f"this run has {live_rank}: set it to {saved_rank}, or start anew with another "
            "trainer.experiment_name"
        )
    key = "target_modules" if live_rank else "path"
    for name in sorted(live.keys() | saved.keys()):
        if live.get(name) != saved.get(name):
            raise UserError(
                f"{reader.folder} holds another model: {name} is {saved.get(name, 'not there')} "
                f"there and {live.get(name, 'not there')} here; set {model}.{key} "
                "to what the run began with, or start anew with another trainer.experiment_name"
            )


def _lora_rank(shapes: _Shapes) -> int:
    """The rank of the LoRA adapters; 0 without adapters."""
    for name, shape in shapes.items():
        if ".lora_A." in name:
            return shape[0]
    return 0


def _saved_kind(reader: CheckpointReader, fragment: Fragment) -> str:
    """The saved kind that fills a live fragment: the same one if it has the same type.

    Masters and weights stand in for each other, since a weight is its master copy, rounded.
    """
    if fragment.kind not in (WEIGHT, MASTER):
        return fragment.kind
    if reader.dtype(fragment.name, fragment.kind) == dtype_name(fragment.tensor):
        return fragment.kind
    return MASTER if reader.dtype(fragment.name, MASTER) else WEIGHT
