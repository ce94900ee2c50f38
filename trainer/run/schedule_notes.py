"""What a resumed run says of its learning rate when the number of its steps has changed."""

from __future__ import annotations

from collections.abc import Callable

from trainer.config.schema.actor import Optim

OPTIM = "actor_rollout_ref.actor.optim"


def schedule_notes(
    optim: Optim, *, step: int, before: int | None, now: int, rate: Callable[[int], float]
) -> list[str]:
    """Lines for the user of a run that goes on from ``step``.

    ``before``: the steps that the run was to take when the checkpoint was written, None where that
    isn't known; ``now``: those it takes. ``rate``: the learning rate of a step, counted from 1.
    """
    if before is None or before == now or step >= now:
        return []
    change = f"The run takes {now} steps, not {before} as until step {step}"
    follows = optim.total_training_steps is None
    falls = optim.lr_scheduler_type != "constant"
    warms_up_by_share = optim.lr_warmup_steps is None and optim.lr_warmup_steps_ratio > 0
    rates = f"{rate(step + 1):.3g} at step {step + 1}, {rate(now):.3g} at step {now}"
    if not falls and not (warms_up_by_share and follows):
        return [f"{change}: the learning rate stays {rate(step + 1):.3g}."]
    if not follows:
        text = (
            f"{change}: the learning rate still follows {OPTIM}.total_training_steps="
            f"{optim.total_training_steps} ({rates})."
        )
        if rate(now) == 0.0:
            text = (
                f"[WARNING] {text} Steps with rate 0 train nothing: raise that key, or set "
                f"{OPTIM}.min_lr_ratio."
            )
        return [text]
    return [
        f"{change}: the {optim.lr_scheduler_type} schedule of the learning rate is laid over all "
        f"{now} steps, so the rate is now {rates}. To go on with a rate of your own set "
        f"{OPTIM}.lr_scheduler_type=constant and {OPTIM}.lr; {OPTIM}.total_training_steps={before} "
        f"with {OPTIM}.min_lr_ratio keeps the old schedule."
    ]
