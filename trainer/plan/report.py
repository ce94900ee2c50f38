"""The text of ``python -m trainer.plan``, section by section."""

from __future__ import annotations

from dataclasses import replace

from trainer.base.model_shape import ModelShape
from trainer.config.checks.batch_sizes import Sizes, derive
from trainer.config.schema import Config
from trainer.plan.batch_sections import batch_rows, budget_rows
from trainer.plan.lengths import DataLengths
from trainer.plan.options import PlanOptions
from trainer.plan.resource_sections import checkpoint_rows, memory_rows, time_rows


def sizes_of(config: Config, options: PlanOptions, shape: ModelShape | None) -> Sizes:
    """The batch and parallel sizes of the plan, with the model's numbers where it is known."""
    from_config = Sizes.from_config(config)
    cp = from_config.cp if options.cp is None else options.cp
    sizes = replace(from_config, tp=options.tp, pp=options.pp, ep=options.ep, cp=cp)
    if shape is None:
        return sizes
    return replace(sizes, heads=shape.heads, layers=shape.layers, experts=shape.experts)


def report(
    config: Config,
    options: PlanOptions,
    sizes: Sizes,
    shape: ModelShape | None,
    lengths: DataLengths | None,
    critic: ModelShape | None = None,
) -> str:
    """All sections; ``critic``: the shape of the critic, where one is trained and known.

    Raises ValueError with every violation when sizes do not divide."""
    derived = derive(sizes)
    mean = _mean_lengths(config, options, lengths)
    sections = [
        ("Batch sizes", batch_rows(config, sizes, derived, mean)),
        ("Token budget", budget_rows(config, options, mean, lengths)),
    ]
    if shape is None:
        path = config.actor_rollout_ref.model.path
        reason = f"{path} is not here" if path else "not set"
        rows = iter([("", f"unknown: actor_rollout_ref.model.path ({reason})")])
        sections.append(("Memory", rows))
    else:
        sections.append(("Memory of a rank", memory_rows(config, options, derived, shape, critic)))
        sections.append(("Checkpoint", checkpoint_rows(config, options, shape, critic)))
    sections.append(("Time", time_rows(config, options, sizes, lengths)))
    text = []
    for title, rows in sections:
        lines = [f"  {name:<28}{value}\n" for name, value in rows]
        text.append(f"{title}\n" + "".join(lines))
    return "\n".join(text)


def _mean_lengths(
    config: Config, options: PlanOptions, lengths: DataLengths | None
) -> tuple[float, float]:
    """Mean prompt and response in tokens: those of the options, else of the data, else half of the
    limits.
    """
    data = config.data
    prompt = options.mean_prompt or (lengths.mean_prompt if lengths else data.max_prompt_length / 2)
    measured = lengths.mean_response if lengths else None
    return prompt, options.mean_response or measured or data.max_response_length / 2
