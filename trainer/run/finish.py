"""The end of a run: export, pictures, and where everything is."""

from __future__ import annotations

from pathlib import Path

from trainer.base.metrics_file import METRICS_FILE
from trainer.export import write_folder
from trainer.run.build import Context
from trainer.run.checkpoints import Keeper
from trainer.run.reporter import Show
from trainer.tracking.pictures import draw_pictures

WEIGHTS = "huggingface"
"""Folder of the run that holds the exported weights."""


def close_run(ctx: Context, keeper: Keeper, show: Show) -> None:
    """Export the weights if asked for, draw the pictures, and say where things are and what to try
    next.
    """
    if ctx.config.trainer.export_hf:
        export(ctx)
    show.last_save(ctx.total_steps)
    if ctx.world.is_main:
        show.finish_pictures(ctx.total_steps)
        pictures = draw_pictures(ctx.run_dir)
        show.tracker.message(
            "\n".join([*show.verdict(), *places(ctx, keeper, show, pictures), *advice(ctx)])
        )


def export(ctx: Context) -> None:
    """``<run>/huggingface``: weights, config and tokenizer that transformers and vLLM read."""
    with ctx.engine.whole_weights() as module:
        if ctx.world.is_main:
            write_folder(module, ctx.tokenizer, ctx.run_dir / WEIGHTS)
    ctx.world.barrier()


def places(ctx: Context, keeper: Keeper, show: Show, pictures: list[Path]) -> list[str]:
    """One line for each thing that the run leaves behind."""
    found: list[tuple[str, object]] = [
        ("config", ctx.run_dir / "config.yaml"),
        ("metrics", ctx.run_dir / METRICS_FILE),
    ]
    if show.tracker.wandb_url is not None:
        found.append(("W&B run", show.tracker.wandb_url))
    elif show.tracker.wandb_folder is not None:
        found.append(("W&B run", f"{show.tracker.wandb_folder}  (upload: wandb sync FOLDER)"))
    if keeper.newest is not None:
        found.append(("checkpoint", keeper.newest))
    if keeper.best is not None and keeper.best[0] != keeper.newest:
        found.append(("best", f"{keeper.best[0]}  ({keeper.best[1]})"))
    if ctx.config.trainer.export_hf:
        found.append(("weights", ctx.run_dir / WEIGHTS))
    found += [("picture", path) for path in pictures]
    return [f"  {name:<10}  {where}" for name, where in found]


def advice(ctx: Context) -> list[str]:
    """What to type next."""
    weights = ctx.run_dir / WEIGHTS
    if not ctx.is_rl and ctx.config.trainer.export_hf:
        same = "experiment=demo_grpo" if ctx.config.data.task else "experiment=gsm8k"
        return [
            "Next: reinforce it",
            f"  python -m trainer {same} actor_rollout_ref.model.path={weights}",
        ]
    return [
        "Next: the same again with another budget, or a sweep on Slurm",
        f"  python -m trainer --config-path {ctx.run_dir} --config-name config "
        "trainer.default_local_dir=OTHER_FOLDER "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "  python -m trainer -m experiment=demo_grpo "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512,1024,4096",
    ]
