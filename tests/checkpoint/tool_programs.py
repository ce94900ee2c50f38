"""Programs for ranks that test DeepSpeed's own tools, and the export, on our checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
from pathlib import Path

import torch
import torch.distributed as dist

from tests.checkpoint.rank_programs import make_checkpointer
from tests.checkpoint.tiny_training import full_state, join, make_engine, train_step
from trainer.checkpoint.snapshot.fragments import full_shapes
from trainer.parallel.deepspeed_setup import EngineSettings
from trainer.parallel.engine import Engine


def deepspeed_tools(rank: int, size: int, run: str, store: str) -> None:
    """Save with each stage and type, then run both tools on the folder as it is, on rank 0."""
    world = join(rank, size, Path(store))
    for stage, bf16 in [(1, False), (2, True), (3, True)]:
        home = Path(run) / f"{stage}-{bf16}"
        home.mkdir(exist_ok=True)
        engine = make_engine(world, stage=stage, bf16=bf16)
        checkpointer = make_checkpointer(world, engine, home)
        for step in (1, 2):
            train_step(engine, step)
        assert checkpointer.save(2, {}, {}, blocking=True)
        checkpointer.close()
        state = full_state(engine)
        if rank == 0:
            sizes = {name: torch.Size(shape) for name, shape in full_shapes(engine.ds).items()}
            folder = home / "checkpoints" / "step_2"
            found_by_script = dict(sizes)
            if stage == 1:
                # Here DeepSpeed saves untrained weights with the module alone, where its script
                # doesn't look.
                del found_by_script["frozen"]
            _check_consolidated(folder, state, found_by_script)
            _check_universal(folder, home / "universal", state, sizes)
        dist.barrier()
        engine.ds.destroy()


def _expected(
    name: str, kind: str, state: dict[str, torch.Tensor], shape: torch.Size
) -> torch.Tensor:
    value = state.get(f"{name}/{kind}")
    return (state[f"{name}/weight"] if value is None else value).float().view(shape)


def _check_consolidated(
    folder: Path, state: dict[str, torch.Tensor], sizes: dict[str, torch.Size]
) -> None:
    """Consolidate by DeepSpeed's script in the folder and compare."""
    spec = importlib.util.spec_from_file_location("zero_to_fp32", folder / "zero_to_fp32.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    with contextlib.redirect_stdout(io.StringIO()):
        found = script.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    assert set(found) == {*sizes, "head.weight"}, found.keys()
    assert torch.equal(found["head.weight"], found["embed.weight"])
    for name, shape in sizes.items():
        assert torch.equal(found[name].float(), _expected(name, "fp32", state, shape)), name


def _check_universal(
    folder: Path, out: Path, state: dict[str, torch.Tensor], sizes: dict[str, torch.Size]
) -> None:
    from deepspeed.checkpoint import ds_to_universal

    args = argparse.Namespace(
        input_folder=str(folder / "global_step2"),
        output_folder=str(out),
        num_extract_workers=1,
        num_merge_workers=1,
        keep_temp_folder=False,
        strict=True,
        inject_missing_state=False,
    )
    out.mkdir()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        ds_to_universal.main(args)
    trained = [name for name in sizes if f"{name}/exp_avg" in state]
    assert len(trained) == 6, trained
    for name in trained:
        for kind in ("fp32", "exp_avg", "exp_avg_sq"):
            found = torch.load(out / "zero" / name / f"{kind}.pt", weights_only=True)
            found = found["param"] if isinstance(found, dict) else found
            assert torch.equal(
                found.view(sizes[name]), _expected(name, kind, state, sizes[name])
            ), f"{name} {kind}"


def export(rank: int, size: int, run: str, store: str) -> None:
    """A checkpoint of a ZeRO-3 run in bfloat16, exported, equals the weights of the engine."""
    from tests.config.helpers import minimal_settings
    from trainer.config import freeze, load
    from trainer.models import load_model

    world = join(rank, size, Path(store))
    home = Path(run)
    model = load_model("builtin:tiny", dtype=torch.bfloat16, device="cpu").model
    engine = Engine(
        model,
        EngineSettings(zero_stage=3, bf16=True, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1),
        world,
    )
    checkpointer = make_checkpointer(world, engine, home)
    ids = torch.arange(12).view(1, -1)
    engine.backward(engine.forward(input_ids=ids).logits.float().square().mean())
    engine.step(lr=1e-2, max_norm=1.0)
    assert checkpointer.save(1, {}, {}, blocking=True)
    checkpointer.close()
    masters = full_state(engine)
    with engine.whole_weights() as whole:
        weights = {name: param.detach().clone() for name, param in whole.named_parameters()}
    if rank == 0:
        changes = {
            "actor_rollout_ref.model.path": "builtin:tiny",
            "actor_rollout_ref.actor.mixed_precision": "bf16",
        }
        freeze(load(minimal_settings(**{"trainer.default_local_dir": run, **changes})), home)
        untrained = dict(
            load_model("builtin:tiny", dtype=torch.bfloat16, device="cpu").model.named_parameters()
        )
        assert not all(torch.equal(untrained[name], weights[name]) for name in weights)
        exact = {
            name: masters[f"{name}/fp32"].view(weight.shape) for name, weight in weights.items()
        }
        _check_export(home, home / "exported-fp32", ["--dtype", "fp32"], exact)
        _check_export(home, home / "exported", [], weights)
    dist.barrier()


def _check_export(
    run: Path, out: Path, options: list[str], expected: dict[str, torch.Tensor]
) -> None:
    from transformers import AutoModelForCausalLM

    from trainer import export as export_command
    from trainer.models import load_model

    assert export_command.main([str(run), "--out", str(out), *options]) == 0
    loaded = AutoModelForCausalLM.from_pretrained(out, dtype="auto")
    found = dict(loaded.named_parameters())
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype, f"{options}: {name}"
        assert torch.equal(found[name], tensor), f"{options}: {name}"
    tokenizer = load_model(str(out), dtype=torch.float32, device="cpu").tokenizer
    assert tokenizer.eos_token is not None
