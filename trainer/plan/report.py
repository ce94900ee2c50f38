"""The text of a plan."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import ceil

from trainer.base.precision import planned
from trainer.batching.budget import MEMORY_ADVICE, recommended_budget
from trainer.batching.cost import ModelShape
from trainer.config.checks.batch_sizes import Derived, Sizes, derive
from trainer.config.checks.cross import sizes_of
from trainer.config.schema import Config
from trainer.plan import memory
from trainer.plan.lengths import Lengths
from trainer.plan.options import Words


def sizes_with(config: Config, words: Words, shape: ModelShape | None) -> Sizes:
    """The algebra's inputs with the parallel sizes of the plan and the model's numbers."""
    own = sizes_of(config)
    sizes = replace(
        own, tp=words.tp, pp=words.pp, ep=words.ep, cp=own.cp if words.cp is None else words.cp
    )
    if shape is None:
        return sizes
    return replace(sizes, heads=shape.heads, layers=shape.layers, experts=shape.experts)


def report(
    config: Config, words: Words, sizes: Sizes, shape: ModelShape | None, lengths: Lengths | None
) -> str:
    """The plan in sections. Raises ValueError with every violation when sizes do not divide."""
    derived = derive(sizes)
    mean = _mean_lengths(config, words, lengths)
    sections = [
        ("Batch sizes", _algebra(config, sizes, derived, mean)),
        ("Token budget", _budget(config, words, mean, lengths)),
    ]
    if shape is None:
        why = (
            f"{config.actor_rollout_ref.model.path} is not here"
            if config.actor_rollout_ref.model.path
            else "not set"
        )
        sections.append(("Memory", iter([("", f"unknown: actor_rollout_ref.model.path ({why})")])))
    else:
        sections.append(("Memory of a rank", _memory(config, words, derived, shape)))
        sections.append(("Checkpoint", _checkpoint(config, words, shape)))
    sections.append(("Time", _time(config, words, sizes, lengths)))
    return "\n".join(
        f"{title}\n" + "".join(f"  {n:<28}{v}\n" for n, v in rows) for title, rows in sections
    )


def _mean_lengths(config: Config, words: Words, lengths: Lengths | None) -> tuple[float, float]:
    """Mean prompt and response, tokens: as given, as measured, else half of what is allowed."""
    data = config.data
    prompt = words.mean_prompt or (lengths.mean_prompt if lengths else data.max_prompt_length / 2)
    measured = lengths.mean_response if lengths else None
    return prompt, words.mean_response or measured or data.max_response_length / 2


def _algebra(
    config: Config, sizes: Sizes, derived: Derived, mean: tuple[float, float]
) -> Iterator[tuple[str, str]]:
    yield (
        "world",
        f"{sizes.world} = tp {sizes.tp} * pp {sizes.pp} * cp {sizes.cp} * dp {derived.dp} (ep "
        f"{sizes.ep})",
    )
    yield (
        "sequences of an iteration",
        f"{derived.samples} = {sizes.train_batch_size} prompts * n {sizes.n}",
    )
    yield (
        "optimizer steps",
        f"{derived.optimizer_steps} an iteration = {sizes.ppo_epochs} * {sizes.train_batch_size} / "
        f"{sizes.ppo_mini_batch_size}" + _ratio_advice(sizes),
    )
    yield (
        "sequences of a step",
        f"{derived.mini_per_rank} a rank = {sizes.ppo_mini_batch_size} * {sizes.n} / {derived.dp}",
    )
    if derived.accumulation is not None:
        yield (
            "micro-batches of a step",
            f"{derived.accumulation} of {sizes.micro_batch_size} sequences",
        )
        return
    budget = _least_budget(config)
    if budget is None:
        yield "micro-batches of a step", "budget auto: known at start"
        return
    least = derived.least_accumulation(sum(mean), budget * sizes.cp)
    yield (
        "micro-batches of a step",
        f"at least {least} = {derived.mini_per_rank} * {sum(mean):.0f} tokens / {budget}",
    )


def _ratio_advice(sizes: Sizes) -> str:
    ratio = sizes.train_batch_size // sizes.ppo_mini_batch_size
    return (
        ""
        if ratio == 4
        else "  (4 mini-batches a batch are recommended for RL)"
        if sizes.n > 1
        else ""
    )


def _budget(
    config: Config, words: Words, mean: tuple[float, float], lengths: Lengths | None
) -> Iterator[tuple[str, str]]:
    if lengths is not None:
        how = (
            "by the model's tokenizer"
            if lengths.exact
            else "estimated from characters: no tokenizer at hand"
        )
        yield "data", f"{lengths.rows} rows, the first {lengths.measured} measured, {how}"
        over = (
            ": raise data.max_prompt_length or max_response_length"
            if lengths.longest > _longest(config)
            else ""
        )
        yield "longest", f"{lengths.longest} tokens (allowed {_longest(config)}){over}"
    given = words.mean_response is not None or (
        lengths is not None and lengths.mean_response is not None
    )
    half = "" if given else "  (half of data.max_response_length; set plan.mean_response)"
    yield "mean prompt + response", f"{mean[0]:.0f} + {mean[1]:.0f} tokens{half}"
    raw = round(sum(mean) * words.concurrent)
    best = max(
        recommended_budget(*mean, words.concurrent), 1 << (_longest(config) - 1).bit_length()
    )
    yield (
        "recommended",
        f"{best} = ({mean[0]:.0f} + {mean[1]:.0f}) * {words.concurrent} = {raw}, to the next power "
        "of two",
    )
    yield "now", f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={_budget_text(config)}"


def _memory(
    config: Config, words: Words, derived: Derived, shape: ModelShape
) -> Iterator[tuple[str, str]]:
    actor, rollout, model = (
        getattr(config.actor_rollout_ref, name) for name in ("actor", "rollout", "model")
    )
    held = _kv_sequences(config, derived) * _longest(config) if config.trainer.mode == "rl" else 0
    static = (actor.ppo_micro_batch_size_per_gpu or 1) * _longest(config)
    found = memory.predict(
        shape,
        dp=derived.dp,
        zero_stage=actor.zero_stage,
        precision=planned(actor.mixed_precision),
        micro_batch_tokens=(_least_budget(config) or _longest(config))
        if actor.use_dynamic_bsz
        else static,
        recompute=model.enable_gradient_checkpointing,
        reference=config.trainer.mode == "rl"
        and (actor.use_kl_loss or config.algorithm.use_kl_in_reward),
        kv_tokens=held,
        param_offload=actor.param_offload,
        optimizer_offload=actor.optimizer_offload,
        adapters=(adapters := memory.adapter_params(shape, model.lora_rank, model.target_modules)),
    )
    trained = f" and {adapters / 1e6:,.1f} M of adapters, which are trained" if adapters else ""
    yield "parameters", f"{shape.params / 1e6:,.1f} M{trained}"
    for name in ("weights", "gradients", "optimizer", "reference", "activations", "logits"):
        yield name, _gib(getattr(found, name))
    yield "peak of an update", _gib(found.training)
    if held:
        yield (
            "key/value cache",
            f"{_gib(found.kv_cache)} for {held // _longest(config)} sequences at once "
            f"({rollout.name})",
        )
        yield "peak of generation", _gib(found.generation)
    if words.gpu_gb is not None:
        peak, room = max(found.training, found.generation), words.gpu_gb * 1e9
        verdict = "fits" if peak <= room else f"DOES NOT FIT: {MEMORY_ADVICE}"
        yield "GPU", f"{peak / 1e9:,.1f} of {words.gpu_gb:g} GB: {verdict}"
    if found.host:
        yield "in host memory", _gib(found.host)


def _checkpoint(config: Config, words: Words, shape: ModelShape) -> Iterator[tuple[str, str]]:
    actor, model, trainer = (
        config.actor_rollout_ref.actor,
        config.actor_rollout_ref.model,
        config.trainer,
    )
    size = memory.checkpoint_bytes(
        shape,
        precision=planned(actor.mixed_precision),
        zero_stage=actor.zero_stage,
        reference=config.actor_rollout_ref.ref.ema_interval is not None,
        adapters=memory.adapter_params(shape, model.lora_rank, model.target_modules),
    )
    seconds = size / (words.write_gb_s * 1e9)
    need = seconds * trainer.checkpoint.save_margin
    fits = (
        "fits"
        if need <= trainer.grace_period_s
        else "DOES NOT FIT: raise the grace period or write faster"
    )
    yield "size", _gib(size)
    yield "time to save", f"{seconds:.1f} s at {words.write_gb_s:g} GB/s (plan.write_gb_s)"
    yield (
        "grace period",
        f"{trainer.grace_period_s:g} s against {need:.1f} s with margin "
        f"{trainer.checkpoint.save_margin:g}: {fits}",
    )


def _time(
    config: Config, words: Words, sizes: Sizes, lengths: Lengths | None
) -> Iterator[tuple[str, str]]:
    steps = words.steps or config.trainer.total_training_steps
    if steps is None and lengths is not None and lengths.rows:
        rows = min(lengths.rows, config.data.train_max_samples or lengths.rows)
        steps = config.trainer.total_epochs * (rows // sizes.train_batch_size)
    yield (
        "steps",
        "unknown: set trainer.total_training_steps or plan.steps" if steps is None else str(steps),
    )
    if words.step_time_s is None:
        yield "GPU-hours", "give plan.step_time_s=SECONDS"
    elif steps is not None:
        hours = steps * words.step_time_s / 3600
        yield (
            "GPU-hours",
            f"{hours * sizes.world:,.2f} = {steps} * {words.step_time_s:g} s * {sizes.world} "
            f"({hours:,.2f} h)",
        )


def _least_budget(config: Config) -> int | None:
    budget = config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu
    if isinstance(budget, str):
        return None
    return min(budget) if isinstance(budget, list) else budget


def _budget_text(config: Config) -> str:
    return str(config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu).replace(" ", "")


def _longest(config: Config) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _kv_sequences(config: Config, derived: Derived) -> int:
    return min(ceil(derived.samples / derived.dp), config.actor_rollout_ref.rollout.max_num_seqs)


def _gib(size: int) -> str:
    return f"{size / 2**30:,.2f} GiB"
