"""The end of a run: export, pictures, and a list of everything that it leaves behind."""

from __future__ import annotations

from pathlib import Path

from trainer.base.metrics_file import METRICS_FILE
from trainer.models.huggingface import write_folder
from trainer.run.checkpoints import RunCheckpoints
from trainer.run.context import RunContext
from trainer.run.reporter import RunReporter
from trainer.tracking.optional_output import optional_output
from trainer.tracking.pictures import draw_pictures

WEIGHTS = "huggingface"
"""Folder in the run folder that holds the exported weights."""


def finish(ctx: RunContext, checkpoints: RunCheckpoints, reporter: RunReporter) -> None:
    """Export the weights if asked for, draw the pictures, and print the outcome. Collective."""
    if ctx.config.trainer.export_hf:
        export(ctx)
    reporter.log_last_save(ctx.total_steps)
    if ctx.world.is_main:
        reporter.finish_pictures(ctx.total_steps)
        pictures: list[Path] = []
        with optional_output("plots/", reporter.message):
            pictures = draw_pictures(ctx.run_dir)
        lines = [
            reporter.summary(),
            *output_lines(ctx, checkpoints, reporter, pictures),
            *next_commands(ctx),
        ]
        reporter.message("\n".join(lines))


def export(ctx: RunContext) -> None:
    """Write weights, config and tokenizer to ``<run>/huggingface``. Collective."""
    with ctx.engine.whole_weights() as module:
        if ctx.world.is_main:
            write_folder(module, ctx.tokenizer, ctx.run_dir / WEIGHTS)
    ctx.world.barrier()


def output_lines(
    ctx: RunContext, checkpoints: RunCheckpoints, reporter: RunReporter, pictures: list[Path]
) -> list[str]:
    """One line for each output of the run: its kind and where it is."""
    outputs: list[tuple[str, object]] = [
        ("config", ctx.run_dir / "config.yaml"),
        ("metrics", ctx.run_dir / METRICS_FILE),
    ]
    if reporter.wandb_location is not None:
        outputs.append(("W&B run", reporter.wandb_location))
    if checkpoints.newest is not None:
        outputs.append(("checkpoint", checkpoints.newest))
    if checkpoints.best is not None:
        folder, metric = checkpoints.best
        if folder != checkpoints.newest:
            outputs.append(("best", f"{folder}  ({metric})"))
    if ctx.config.trainer.export_hf:
        outputs.append(("weights", ctx.run_dir / WEIGHTS))
    outputs += [("picture", path) for path in pictures]
    return [f"  {kind:<10}  {location}" for kind, location in outputs]


def next_commands(ctx: RunContext) -> list[str]:
    """Commands that a user may want to type next."""
    weights = ctx.run_dir / WEIGHTS
    if not ctx.is_rl and ctx.config.trainer.export_hf:
        experiment = "demo_grpo" if ctx.config.data.task else "gsm8k"
        return [
            "Next: reinforce it",
            f"  python -m trainer experiment={experiment} actor_rollout_ref.model.path={weights}",
        ]
    return [
        "Next: the same again with another budget, or a sweep on Slurm",
        f"  python -m trainer --config-path {ctx.run_dir} --config-name config "
        "trainer.default_local_dir=OTHER_FOLDER "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=2048",
        "  python -m trainer -m experiment=demo_grpo "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=512,1024,4096",
    ]
