"""verl's other spellings: of keys, of groups of keys and of values."""

from __future__ import annotations

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"

GROUPS: dict[str, str] = {
    "optim": f"{_ACTOR}.optim",
    "model": _MODEL,
    "engine": f"{_ACTOR}.fsdp_config",
    "checkpoint": f"{_ACTOR}.checkpoint",
    "reward.custom_reward_function": "custom_reward_function",
    "reward.reward_model": "reward_model",
    "reward_model.reward_kwargs.overlong_buffer_cfg": "reward_model.overlong_buffer",
    "reward.sandbox_fusion": "sandbox_fusion",
}
"""Another name of a group of keys -> the group. The first four are those of verl's SFT trainer."""

ALIASES: dict[str, str] = {
    "actor_rollout.backend": "actor_rollout_ref.hybrid_engine",
    "trainer.use_hybrid_engine": "actor_rollout_ref.hybrid_engine",
    "trainer.save_freq": "trainer.checkpoint.save_freq",
    "trainer.max_actor_ckpt_to_keep": "trainer.checkpoint.keep_last",
    "trainer.max_ckpt_to_keep": "trainer.checkpoint.keep_last",
    "trainer.profile_steps": "trainer.profiler.steps",
    "global_profiler.steps": "trainer.profiler.steps",
    "global_profiler.tool": "trainer.profiler.tool",
    "global_profiler.save_path": "trainer.profiler.save_path",
    "data.dataloader_num_workers": "data.num_workers",
    "data.reward_fn_key": "data.data_source_key",
    "data.messages_key": "data.prompt_key",
    "data.max_token_len_per_gpu": f"{_ACTOR}.ppo_max_token_len_per_gpu",
    f"{_ACTOR}.optim.warmup_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_scheduler": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_decay_style": f"{_ACTOR}.optim.lr_scheduler_type",
    f"{_ACTOR}.optim.lr_decay_steps": f"{_ACTOR}.optim.total_training_steps",
    f"{_ACTOR}.optim.min_lr_factor": f"{_ACTOR}.optim.min_lr_ratio",
    f"{_ACTOR}.optim.clip_grad": f"{_ACTOR}.grad_clip",
    f"{_ACTOR}.checkpoint.contents": f"{_ACTOR}.checkpoint.save_contents",
    f"{_ACTOR}.fsdp_config.strategy": f"{_ACTOR}.strategy",
    f"{_ACTOR}.fsdp_config.param_offload": f"{_ACTOR}.param_offload",
    f"{_ACTOR}.fsdp_config.grad_offload": f"{_ACTOR}.grad_offload",
    f"{_ACTOR}.fsdp_config.optimizer_offload": f"{_ACTOR}.optimizer_offload",
    f"{_ACTOR}.fsdp_config.ulysses_sequence_parallel_size": (
        f"{_ACTOR}.ulysses_sequence_parallel_size"
    ),
    "critic.optim.warmup_style": "critic.optim.lr_scheduler_type",
    "critic.optim.lr_scheduler": "critic.optim.lr_scheduler_type",
    "critic.optim.clip_grad": "critic.grad_clip",
    "critic.model.fsdp_config.param_offload": "critic.param_offload",
    "critic.model.fsdp_config.optimizer_offload": "critic.optimizer_offload",
    "critic.fsdp.param_offload": "critic.param_offload",
    "critic.fsdp.optimizer_offload": "critic.optimizer_offload",
    f"{_MODEL}.lora.rank": f"{_MODEL}.lora_rank",
    f"{_MODEL}.lora.alpha": f"{_MODEL}.lora_alpha",
    f"{_MODEL}.lora.target_modules": f"{_MODEL}.target_modules",
    "data.custom_chat_template": "data.chat_template",
    f"{_MODEL}.custom_chat_template": "data.chat_template",
}
"""Another spelling -> our key."""

VALUES: dict[tuple[str, str], str] = {
    ("actor_rollout_ref.hybrid_engine", "hybrid"): "true",
    ("trainer.profiler.tool", "null"): "torch",
    ("algorithm.kl_penalty", "kl"): "k1",
    ("algorithm.kl_penalty", "mse"): "k2",
    ("algorithm.kl_penalty", "low_var_kl"): "k3",
    ("data.train_max_samples", "-1"): "null",
    ("data.val_max_samples", "-1"): "null",
    (f"{_ACTOR}.optim.total_training_steps", "-1"): "null",
    (f"{_ACTOR}.optim.lr_warmup_steps", "-1"): "null",
    ("critic.optim.total_training_steps", "-1"): "null",
    ("critic.optim.lr_warmup_steps", "-1"): "null",
    ("custom_reward_function.name", "null"): "compute_score",
    ("trainer.logger", "file"): "console",
}
"""(our key, verl's value in lower case) -> the value here."""

DROPPED_ITEMS: dict[str, frozenset[str]] = {"trainer.logger": frozenset({"file"})}
"""Our key -> items of verl's list that ask for what happens anyway."""


def our_name(key: str) -> str:
    """``key`` as it is called here; unchanged when verl has no other spelling of it."""
    parts = key.split(".")
    for count in range(len(parts) - 1, 0, -1):
        group = GROUPS.get(".".join(parts[:count]))
        if group is not None:
            key = ".".join([group, *parts[count:]])
            break
    return ALIASES.get(key, key)
