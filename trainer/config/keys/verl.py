"""verl's keys that have another name here, and those that are not supported, each with the
reason.
"""

from __future__ import annotations

_DEEPSPEED = "DeepSpeed is the only training engine"
_ACTOR = "actor_rollout_ref.actor"
_OFFLOAD = f"set {_ACTOR}.param_offload, grad_offload or optimizer_offload"

ALIASES: dict[str, str] = {
    "actor_rollout.backend": "actor_rollout_ref.hybrid_engine",
    "trainer.use_hybrid_engine": "actor_rollout_ref.hybrid_engine",
    "trainer.save_freq": "trainer.checkpoint.save_freq",
    "trainer.max_actor_ckpt_to_keep": "trainer.checkpoint.keep_last",
    "data.dataloader_num_workers": "data.num_workers",
    "data.reward_fn_key": "data.data_source_key",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    f"{_ACTOR}.fsdp_config.param_offload": f"{_ACTOR}.param_offload",
    f"{_ACTOR}.fsdp_config.grad_offload": f"{_ACTOR}.grad_offload",
    f"{_ACTOR}.fsdp_config.optimizer_offload": f"{_ACTOR}.optimizer_offload",
}
"""Another spelling -> our key. Both with different values is an error."""

ALIAS_VALUES: dict[tuple[str, str], bool] = {("actor_rollout.backend", "hybrid"): True}
"""(alias, its value as typed) -> the value of our key."""

REDUNDANT: dict[str, frozenset[str]] = {
    "actor_rollout_ref.model.use_remove_padding": frozenset({"true"}),
    f"{_ACTOR}.use_remove_padding": frozenset({"true"}),
    "actor_rollout_ref.model.use_shm": frozenset({"false"}),
    "actor_rollout_ref.ref.fsdp_config.param_offload": frozenset({"false"}),
    "actor_rollout_ref.rollout.mode": frozenset({"sync"}),
    "actor_rollout_ref.rollout.ignore_eos": frozenset({"false"}),
    "actor_rollout_ref.rollout.multi_turn.enable": frozenset({"false"}),
    "algorithm.filter_groups.enable": frozenset({"false"}),
    "algorithm.use_pf_ppo": frozenset({"false"}),
    "data.trust_remote_code": frozenset({"false"}),
    "data.validation_shuffle": frozenset({"false"}),
    "trainer.balance_batch": frozenset({"true"}),
    "trainer.critic_warmup": frozenset({"0"}),
}
"""verl's key -> values, as typed in lower case, that ask for what happens anyway. They are accepted
and change nothing.
"""

UNSUPPORTED: dict[str, str] = {
    f"{_ACTOR}.ppo_micro_batch_size": "it is deprecated; use "
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    "actor_rollout_ref.ref.log_prob_micro_batch_size": (
        "it is deprecated; use actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu"
    ),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size": (
        "it is deprecated; use actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
    ),
    "critic.ppo_micro_batch_size": "it is deprecated; use critic.ppo_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "it is deprecated; use reward_model.micro_batch_size_per_gpu",
    f"{_ACTOR}.fsdp_config": f"{_DEEPSPEED}; for sharding set {_ACTOR}.zero_stage, for memory "
    f"{_OFFLOAD}",
    f"{_ACTOR}.megatron": f"{_DEEPSPEED}; tensor, pipeline and expert parallelism of the actor are "
    "not built yet",
    "actor_rollout_ref.ref.fsdp_config": f"{_DEEPSPEED}; the reference follows the actor",
    "actor_rollout_ref.ref.megatron": f"{_DEEPSPEED}; the reference follows the actor",
    "actor_rollout_ref.ref.strategy": f"{_DEEPSPEED}; the reference follows the actor",
    "actor_rollout_ref.ref.ulysses_sequence_parallel_size": "the reference follows the actor's "
    "parallel sizes",
    f"{_ACTOR}.use_torch_compile": "the ragged forward is not compiled; leave the key out",
    f"{_ACTOR}.policy_loss": "the policy loss is PPO's clipped ratio; other losses are not built "
    "yet",
    f"{_ACTOR}.use_fused_kernels": "log-probs are always chunked; leave the key out",
    f"{_ACTOR}.use_remove_padding": "there is no padding to remove; leave the key out",
    "actor_rollout_ref.model.use_remove_padding": "there is no padding to remove; leave the key "
    "out",
    "actor_rollout_ref.model.use_fused_kernels": "log-probs are always chunked; leave the key out",
    "actor_rollout_ref.model.use_liger": "liger kernels are not used; leave the key out",
    "actor_rollout_ref.model.use_shm": "the model is read from its folder directly; leave the key "
    "out",
    "actor_rollout_ref.model.external_lib": "model code from outside transformers is not loaded",
    "actor_rollout_ref.model.enable_activation_offload": (
        "activation offload is not built; use actor_rollout_ref.model.enable_gradient_checkpointing"
    ),
    "actor_rollout_ref.rollout.multi_turn": "use actor_rollout_ref.rollout.agent",
    "actor_rollout_ref.rollout.mode": "use actor_rollout_ref.rollout.name: hf, vllm or vllm_server",
    "actor_rollout_ref.rollout.engine_kwargs": "engine arguments are not passed on; use the keys "
    "of rollout",
    "actor_rollout_ref.rollout.enforce_eager": "vllm decides it; leave the key out",
    "actor_rollout_ref.rollout.free_cache_engine": "the engine always gives its memory back; leave "
    "the key out",
    "actor_rollout_ref.rollout.load_format": "weights are handed over in memory; leave the key out",
    "actor_rollout_ref.rollout.max_model_len": (
        "it is data.max_prompt_length + data.max_response_length; leave the key out"
    ),
    "actor_rollout_ref.rollout.dtype": f"generation runs in the type of {_ACTOR}.mixed_precision",
    "actor_rollout_ref.rollout.ignore_eos": "generation stops at the end-of-sequence token",
    "actor_rollout_ref.rollout.data_parallel_size": "use actor_rollout_ref.rollout.server.replicas",
    "algorithm.filter_groups": "dynamic sampling (DAPO) is not built yet",
    "algorithm.pf_ppo": "it is not built",
    "algorithm.use_pf_ppo": "it is not built",
    "critic.model": "the value model is not built yet; use algorithm.adv_estimator=grpo",
    "critic.optim": "the value model is not built yet; use algorithm.adv_estimator=grpo",
    "critic.strategy": f"{_DEEPSPEED}; and the value model is not built yet",
    "critic.cliprange_value": "the value model is not built yet; use algorithm.adv_estimator=grpo",
    "critic.ppo_mini_batch_size": "the value model is not built yet; use "
    "algorithm.adv_estimator=grpo",
    "critic.ppo_epochs": "the value model is not built yet; use algorithm.adv_estimator=grpo",
    "reward_model.model": "reward models are not built yet; use custom_reward_function.path",
    "reward_model.reward_manager": "rewards come from the built-in rules or "
    "custom_reward_function.path",
    "reward_model.launch_reward_fn_async": "rewards are computed in the step; leave the key out",
    "reward_model.sandbox_fusion": "there is no sandbox; use custom_reward_function.path",
    "custom_reward_function.reward_kwargs": "arguments are not passed on; put them into the "
    "function",
    "data.image_key": "images are not supported",
    "data.video_key": "videos are not supported",
    "data.return_raw_chat": "the chat is kept anyway; leave the key out",
    "data.return_raw_input_ids": "sampled ids are kept anyway; leave the key out",
    "data.return_full_prompt": "leave the key out",
    "data.gen_batch_size": "generation takes the whole batch; use data.train_batch_size",
    "data.tokenizer": "the tokenizer comes with actor_rollout_ref.model.path",
    "data.custom_cls": "own data classes are not loaded; write JSONL or Parquet",
    "data.sampler": "own samplers are not loaded; use data.shuffle",
    "data.validation_shuffle": "validation keeps the order of the files; leave the key out",
    "data.filter_overlong_prompts_workers": "use data.num_workers",
    "data.trust_remote_code": "code that comes with a model is never run",
    "trainer.balance_batch": "work is always balanced over ranks; leave the key out",
    "trainer.critic_warmup": "the value model is not built yet; use algorithm.adv_estimator=grpo",
    "trainer.rollout_data_dir": "set trainer.log_val_generations; generations go to the run folder",
    "trainer.validation_data_dir": "set trainer.log_val_generations; generations go to the run "
    "folder",
    "trainer.ray_wait_register_center_timeout": "there is no Ray",
    "trainer.max_critic_ckpt_to_keep": "the value model is not built yet",
    "trainer.del_local_ckpt_after_load": "use trainer.checkpoint.keep_last",
    "trainer.esi_redundant_time": "use trainer.grace_period_s",
    "trainer.profile_steps": "the profiler is not built yet",
    "ray_init": "there is no Ray: one process per GPU",
    "ray_kwargs": "there is no Ray: one process per GPU",
    "global_profiler": "the profiler is not built yet",
    "actor_rollout_ref.profiler": "the profiler is not built yet",
    "actor_rollout_ref.nccl_timeout": "leave the key out",
    f"{_ACTOR}.profiler": "the profiler is not built yet",
    f"{_ACTOR}.router_replay": "it is not built",
    f"{_ACTOR}.load_weight": "leave the key out",
    f"{_ACTOR}.optim.num_cycles": "the cosine schedule falls once, to min_lr_ratio",
    f"{_ACTOR}.optim.override_optimizer_config": "the optimizer is AdamW with the keys of optim",
    f"{_ACTOR}.optim.optimizer": "the optimizer is AdamW",
    f"{_ACTOR}.optim.optimizer_impl": "the optimizer is AdamW",
    f"{_ACTOR}.checkpoint.load_contents": "a checkpoint is loaded whole",
    f"{_ACTOR}.checkpoint.async_save": "use trainer.checkpoint.async_save",
}
"""Key, or group of keys -> why it does nothing here and what to use."""

_ENGINES = ("fsdp", "fsdp2", "megatron", "veomni")
_GENERATORS = ("sglang", "trtllm", "naive")
_ESTIMATORS = (
    "reinforce_plus_plus_baseline",
    "remax",
    "opo",
    "grpo_passk",
    "gpg",
    "rloo_vectorized",
    "grpo_vectorized",
)


def _unsupported_values() -> dict[tuple[str, str], str]:
    reasons: dict[tuple[str, str], str] = {}
    for name in _ENGINES:
        reason = f"{_DEEPSPEED}; set {_ACTOR}.zero_stage, or leave strategy out"
        reasons[f"{_ACTOR}.strategy", name] = reason
    for name in _GENERATORS:
        reasons["actor_rollout_ref.rollout.name", name] = "set actor_rollout_ref.rollout.name=hf"
    for name in _ESTIMATORS:
        reason = "set algorithm.adv_estimator=grpo, rloo or reinforce_plus_plus"
        reasons["algorithm.adv_estimator", name] = reason
    return reasons


UNSUPPORTED_VALUES = _unsupported_values()
"""(key, value) that verl knows -> what to use here."""


def is_redundant(key: str, value: str) -> bool:
    """Whether verl's ``key=value`` asks for what happens anyway."""
    return value.strip("'\"").lower() in REDUNDANT.get(key, frozenset())


def unsupported_reason(key: str) -> str | None:
    """Why verl's ``key`` (or the group it lies in) is not supported; None for an unknown key."""
    parts = key.split(".")
    for n in range(len(parts), 0, -1):
        reason = UNSUPPORTED.get(".".join(parts[:n]))
        if reason:
            return reason
    return None
