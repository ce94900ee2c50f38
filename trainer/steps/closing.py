"""The end of a run: export, pictures, and where everything is."""

from __future__ import annotations

from trainer.steps.context import Context
from trainer.steps.keeping import Keeper
from trainer.steps.showing import Show
from trainer.tracking import pictures


def close_run(ctx: Context, keeper: Keeper, show: Show) -> None:
    """Write the weights for others to use if asked for, draw the pictures and say where things are."""
    folder = ctx.run_dir / "huggingface"
    if ctx.config.trainer.export_hf:
        with ctx.engine.whole_weights() as module:
            if ctx.world.is_main:
                module.save_pretrained(folder)  # type: ignore[operator]
                ctx.tokenizer.save_pretrained(folder)
        ctx.world.barrier()
    if not ctx.world.is_main:
        return
    show.finish_pictures(ctx.total_steps)
