"""Checks across keys. ``cross_checks`` runs those of this file and of its neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from trainer.config.checks.batch_sizes import Sizes, violations
from trainer.config.checks.budgets import budget_checks
from trainer.config.checks.critic import critic_problems
from trainer.config.checks.no_effect import no_effect_problems
from trainer.config.checks.rollout import rollout_problems
from trainer.config.schema import Config
from trainer.config.schema.algorithm import BY_GROUP
from trainer.config.schema.trainer import default_best_mode

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_ROLLOUT = "actor_rollout_ref.rollout"


def cross_checks(config: Config, *, complete: bool = True) -> list[str]:
    """Everything that contradicts something else, or that is not built, each message with its
    fix. ``complete=False`` lets data and model be missing.
    """
    found = [
        *_sources(config, complete),
        *_not_built(config),
        *_rules(config),
        *_overlong_buffer(config),
        *_contents_of_checkpoints(config),
        *_sampling(config),
        *rollout_problems(config),
        *no_effect_problems(config),
        *budget_checks(config),
        *violations(Sizes.from_config(config)),
        *_engine(config),
        *critic_problems(config),
        *_policy_loss(config),
        *_filter_groups(config),
        *_reference(config),
        *_machines(config),
        *_resuming(config),
        *_best_checkpoint(config),
        *_rollback(config, complete),
        *_profiler(config),
    ]
    return list(dict.fromkeys(found))


def _sources(config: Config, complete: bool) -> Iterator[str]:
    data, trainer = config.data, config.trainer
    files = [name for name in ("train_files", "val_files") if getattr(data, name) is not None]
    if data.task is not None and files:
        yield f"data.task={data.task} and data.{files[0]} are both set; set one of them to null"
    if not complete:
        return
    if data.task is None and data.train_files is None and not trainer.val_only:
        yield "nothing to train on: set data.task=arithmetic, or data.train_files=FILE.jsonl"
    if data.task is None and data.val_files is None and (trainer.val_only or trainer.test_freq > 0):
        validates = f"trainer.test_freq={trainer.test_freq}"
        if trainer.val_only:
            validates = "trainer.val_only=true"
        yield (
            f"{validates}, but there is nothing to validate on: set data.val_files=FILE.jsonl, or "
            "trainer.test_freq=-1"
        )
    if config.actor_rollout_ref.model.path is None:
        yield (
            "no model: set actor_rollout_ref.model.path to a folder, a hub id, builtin:tiny or "
            "builtin:smollm2"
        )


def _not_built(config: Config) -> Iterator[str]:
    ref = config.actor_rollout_ref
    if ref.model.trust_remote_code:
        yield (
            "actor_rollout_ref.model.trust_remote_code=true: code that comes with a model isn't "
            "run; set it to false"
        )
    if not ref.hybrid_engine:
        yield (
            "actor_rollout_ref.hybrid_engine=false: actor, rollout and reference share a process; "
            "set it to true"
        )
    if ref.actor.ulysses_sequence_parallel_size > 1:
        yield (
            f"{_ACTOR}.ulysses_sequence_parallel_size={ref.actor.ulysses_sequence_parallel_size}: "
            "sequence parallelism is not built yet; set it to 1"
        )
    if config.reward_model.enable:
        yield (
            "reward_model.enable=true: reward models are not built yet; set it to false, use "
            "custom_reward_function"
        )
    if not config.data.use_packed_dataset:
        yield (
            "data.use_packed_dataset=false: batches are always ragged, without padding; set it to "
            "true"
        )


def _rules(config: Config) -> Iterator[str]:
    path = config.custom_reward_function.path
    if config.reward.rules and path is not None:
        yield (
            f"reward.rules has no effect with custom_reward_function.path={path}, which scores the "
            "responses of every data source: leave one of them out"
        )


def _overlong_buffer(config: Config) -> Iterator[str]:
    buffer = config.reward_model.overlong_buffer
    longest = config.data.max_response_length
    if buffer.enable and buffer.len > longest:
        yield (
            f"reward_model.overlong_buffer.len={buffer.len} is more than "
            f"data.max_response_length={longest}, so that every response would be penalised; set "
            f"it to {longest} or less"
        )


def _contents_of_checkpoints(config: Config) -> Iterator[str]:
    if not config.trainer.checkpoint.atomic_save:
        yield (
            "trainer.checkpoint.atomic_save=false: checkpoints are always published in one step; "
            "set it to true"
        )
    contents = config.actor_rollout_ref.actor.checkpoint.save_contents
    if "hf_model" in contents:
        yield (
            f"{_ACTOR}.checkpoint.save_contents: hf_model is not part of a checkpoint; leave it "
            "out and set trainer.export_hf=true"
        )
    missing = [part for part in ("model", "optimizer", "extra") if part not in contents]
    if missing:
        yield (
            f"{_ACTOR}.checkpoint.save_contents lacks {', '.join(missing)}: a run could not "
            "continue from it; set [model,optimizer,extra]"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout, data = config.actor_rollout_ref.rollout, config.data
    for key, source, value, expected in (
        ("prompt_length", "max_prompt_length", rollout.prompt_length, data.max_prompt_length),
        (
            "response_length",
            "max_response_length",
            rollout.response_length,
            data.max_response_length,
        ),
    ):
        if value != expected:
            yield (
                f"{_ROLLOUT}.{key}={value} differs from data.{source}={expected}; set "
                f"data.{source} only, the other follows"
            )
    val = rollout.val_kwargs
    if val.n > 1 and (not val.do_sample or val.temperature == 0):
        yield (
            f"{_ROLLOUT}.val_kwargs.n={val.n} would be {val.n} equal answers; set "
            "val_kwargs.do_sample=true and val_kwargs.temperature=1.0, or n=1"
        )
    if config.trainer.mode != "rl":
        return
    name = config.algorithm.adv_estimator
    if rollout.n < 2 and name in BY_GROUP:
        yield (
            f"{_ROLLOUT}.n={rollout.n}: {name} compares responses of one prompt; set {_ROLLOUT}.n "
            "to 2 or more"
        )
    if not rollout.do_sample and not config.trainer.val_only:
        yield (
            f"{_ROLLOUT}.do_sample=false: without sampling there is nothing to learn from; set it "
            "to true"
        )


def _engine(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    if actor.param_offload and actor.zero_stage < 3:
        yield f"{_ACTOR}.param_offload=true needs {_ACTOR}.zero_stage=3 (now {actor.zero_stage})"
    if actor.optimizer_offload and actor.zero_stage < 1:
        yield f"{_ACTOR}.optimizer_offload=true needs {_ACTOR}.zero_stage=1 or more (now 0)"
    if actor.zero_stage == 0 and actor.mixed_precision != "fp32":
        yield (
            f"{_ACTOR}.zero_stage=0 with mixed_precision={actor.mixed_precision}: set "
            f"{_ACTOR}.zero_stage=1 (the same result, the fp32 state sharded), or "
            "mixed_precision=fp32"
        )
    if actor.grad_offload and not actor.optimizer_offload:
        yield (
            f"{_ACTOR}.grad_offload=true goes with {_ACTOR}.optimizer_offload=true; set both, or "
            "neither"
        )
    optim = actor.optim
    if optim.lr_warmup_steps is not None and optim.lr_warmup_steps_ratio > 0:
        yield (
            f"{_ACTOR}.optim.lr_warmup_steps={optim.lr_warmup_steps} and lr_warmup_steps_ratio="
            f"{optim.lr_warmup_steps_ratio} are both set; set lr_warmup_steps=null or "
            "lr_warmup_steps_ratio=0"
        )
    boundaries = actor.bucket_boundaries
    if any(upper <= lower for lower, upper in pairwise(boundaries)):
        yield f"{_ACTOR}.bucket_boundaries={boundaries} must rise; set {sorted(set(boundaries))}"


def _policy_loss(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    loss = actor.policy_loss
    if loss.loss_mode in ("gspo", "geo_mean") and actor.loss_agg_mode != "seq-mean-token-mean":
        yield (
            f"{_ACTOR}.loss_agg_mode={actor.loss_agg_mode}: the loss {loss.loss_mode} is a mean "
            f"over responses; set {_ACTOR}.loss_agg_mode=seq-mean-token-mean"
        )
    if loss.loss_mode == "clip_cov" and loss.clip_cov_lb >= loss.clip_cov_ub:
        yield (
            f"{_ACTOR}.policy_loss.clip_cov_lb={loss.clip_cov_lb} is not below "
            f"clip_cov_ub={loss.clip_cov_ub}: set clip_cov_lb=1.0 clip_cov_ub=5.0"
        )


def _filter_groups(config: Config) -> Iterator[str]:
    settings = config.algorithm.filter_groups
    if not settings.enable:
        return
    n = config.actor_rollout_ref.rollout.n
    if n < 2:
        yield (
            f"algorithm.filter_groups.enable=true compares the responses to a prompt, but "
            f"{_ROLLOUT}.n={n}: set {_ROLLOUT}.n to 2 or more"
        )


def _reference(config: Config) -> Iterator[str]:
    interval = config.actor_rollout_ref.ref.ema_interval
    if interval is None:
        return
    has_kl = config.actor_rollout_ref.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    if not has_kl or config.trainer.mode != "rl":
        yield (
            f"actor_rollout_ref.ref.ema_interval={interval}, but no reference is used: "
            f"set {_ACTOR}.use_kl_loss=true or algorithm.use_kl_in_reward=true, or "
            "ema_interval=null"
        )
    lora_rank = config.actor_rollout_ref.model.lora_rank
    if lora_rank > 0:
        yield (
            f"actor_rollout_ref.ref.ema_interval={interval} with {_MODEL}.lora_rank={lora_rank}: "
            "the reference of LoRA is the model without its adapters and cannot move; set "
            "ema_interval=null, or lora_rank=0"
        )


def _machines(config: Config) -> Iterator[str]:
    trainer = config.trainer
    ranks = trainer.process_on_nodes
    if ranks is None:
        return
    equal = ",".join([str(trainer.n_gpus_per_node)] * trainer.nnodes)
    if len(ranks) != trainer.nnodes:
        yield (
            f"trainer.process_on_nodes has {len(ranks)} numbers for "
            f"trainer.nnodes={trainer.nnodes} machines; set trainer.process_on_nodes=[{equal}]"
        )
    elif any(count != trainer.n_gpus_per_node for count in ranks):
        yield (
            f"trainer.process_on_nodes={ranks} differs from "
            f"trainer.n_gpus_per_node={trainer.n_gpus_per_node}: every machine runs equally many "
            f"ranks; set trainer.process_on_nodes=[{equal}]"
        )


def _resuming(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if trainer.resume_mode == "path" and trainer.resume_from_path is None:
        yield "trainer.resume_mode=path needs trainer.resume_from_path=FOLDER/step_N"
    if trainer.resume_mode != "path" and trainer.resume_from_path is not None:
        yield (
            f"trainer.resume_from_path is set, but trainer.resume_mode={trainer.resume_mode}; set "
            "resume_mode=path"
        )


def _best_checkpoint(config: Config) -> Iterator[str]:
    metric, mode = config.trainer.checkpoint.best_metric, config.trainer.checkpoint.best_mode
    if mode is not None and metric is None:
        yield (
            f"trainer.checkpoint.best_mode={mode}, but of what? Set trainer.checkpoint.best_metric "
            "as well"
        )
    if metric is not None and mode is None and default_best_mode(metric) is None:
        yield (
            f"trainer.checkpoint.best_metric={metric}: is more of it better, or less? Set "
            "trainer.checkpoint.best_mode=max or min"
        )


def _rollback(config: Config, complete: bool) -> Iterator[str]:
    trainer = config.trainer
    if not trainer.rollback.enable:
        return
    if trainer.checkpoint.keep_best == 0:
        yield (
            "trainer.rollback.enable=true goes back to the best checkpoint, but "
            "trainer.checkpoint.keep_best=0 keeps none: set it to 1 or more"
        )
    metric = trainer.checkpoint.best_metric or "val/reward"
    validates = trainer.test_freq > 0
    if complete and not validates and not trainer.val_only and metric.startswith("val"):
        yield (
            f"trainer.rollback.enable=true compares validations ({metric}), but "
            f"trainer.test_freq={trainer.test_freq} makes none while it trains: set "
            "trainer.test_freq=10, or trainer.checkpoint.best_metric to a metric of every step"
        )


def _profiler(config: Config) -> Iterator[str]:
    trainer = config.trainer
    ranks = trainer.nnodes * trainer.n_gpus_per_node
    absent = [rank for rank in trainer.profiler.ranks if rank >= ranks]
    if trainer.profiler.steps is not None and absent:
        yield (
            f"trainer.profiler.ranks={trainer.profiler.ranks}: there are {ranks} rank(s), numbered "
            f"from 0 to {ranks - 1}; leave {absent} out"
        )
