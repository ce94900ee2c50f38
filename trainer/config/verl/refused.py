"""Settings of verl that are not supported: by key, or by one of a key's values, each with the
reason.
"""

from __future__ import annotations

_DEEPSPEED = "DeepSpeed is the only training engine"
_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_OTHER_ENGINES = ("veomni", "torchtitan", "automodel", "mindspeed", "mindspeedllm", "hyperparallel")
_NO_REWARD_MODEL = "reward models are not built yet; use custom_reward_function.path"
_PROFILER = "set trainer.profiler.steps to the steps that are profiled"

REFUSED: dict[str, str] = {
    f"{_ACTOR}.ppo_micro_batch_size": "it is deprecated; use "
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu",
    f"{_REF}.log_prob_micro_batch_size": "it is deprecated; use "
    f"{_REF}.log_prob_micro_batch_size_per_gpu",
    f"{_ROLLOUT}.log_prob_micro_batch_size": "it is deprecated; use "
    f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",
    "critic.ppo_micro_batch_size": "it is deprecated; use critic.ppo_micro_batch_size_per_gpu",
    "reward_model.micro_batch_size": "it is deprecated; use reward_model.micro_batch_size_per_gpu",
    "model_engine": f"{_DEEPSPEED}; leave the key out",
    f"{_ACTOR}.fsdp_config": f"{_DEEPSPEED}; for sharding set {_ACTOR}.zero_stage, for memory "
    f"set {_ACTOR}.param_offload, grad_offload or optimizer_offload",
    f"{_ACTOR}.megatron": f"{_DEEPSPEED}; tensor, pipeline and expert parallelism of the actor are "
    "not built yet",
    **{f"{_ACTOR}.{engine}": f"{_DEEPSPEED}; leave the keys out" for engine in _OTHER_ENGINES},
    f"{_ACTOR}.model_engine": f"{_DEEPSPEED}; leave the key out",
    f"{_ACTOR}.optim.min_lr": f"set {_ACTOR}.optim.min_lr_ratio, a share of lr",
    f"{_ACTOR}.optim.lr_warmup_init": "the warm-up begins at 0",
    f"{_ACTOR}.policy_loss": "it belongs to a policy loss that is not built; see "
    f"{_ACTOR}.policy_loss.loss_mode",
    f"{_ACTOR}.calculate_sum_pi_squared": "the optimal baseline is not built",
    f"{_ACTOR}.pad_to_length": "there is no padding; leave the key out",
    f"{_ACTOR}.loss_scale_factor": "set loss_agg_mode=seq-mean-token-sum-norm, which divides by "
    "data.max_response_length",
    f"{_ACTOR}.qat": "training with quantized weights is not built",
    f"{_ACTOR}.router_replay": "mixture-of-experts models are not built yet",
    f"{_ACTOR}.mtp": "multi-token prediction is not built",
    f"{_ACTOR}.optim.num_cycles": "the cosine schedule falls once, to min_lr_ratio",
    f"{_ACTOR}.optim.override_optimizer_config": "the optimizer is AdamW with the keys of optim",
    f"{_ACTOR}.optim.optimizer": "the optimizer is AdamW",
    f"{_ACTOR}.optim.optimizer_impl": "the optimizer is AdamW",
    f"{_ACTOR}.checkpoint.async_save": "use trainer.checkpoint.async_save",
    f"{_REF}.megatron": f"{_DEEPSPEED}; the reference follows the actor",
    **{f"{_REF}.{engine}": f"{_DEEPSPEED}; leave the keys out" for engine in _OTHER_ENGINES},
    f"{_REF}.strategy": f"{_DEEPSPEED}; the reference follows the actor",
    f"{_REF}.model": "the reference is the model that the run began with",
    f"{_REF}.pad_to_length": "there is no padding; leave the key out",
    f"{_REF}.router_replay": "mixture-of-experts models are not built yet",
    f"{_MODEL}.external_lib": "model code from outside transformers is not loaded",
    f"{_MODEL}.enable_activation_offload": "activation offload is not built; use "
    f"{_MODEL}.enable_gradient_checkpointing",
    f"{_MODEL}.override_config": "a model keeps the config in its folder; change it there",
    f"{_MODEL}.hf_config_path": f"the config lies in the folder of {_MODEL}.path",
    f"{_MODEL}.tokenizer_path": f"the tokenizer lies in the folder of {_MODEL}.path",
    f"{_MODEL}.exclude_modules": f"name the layers to adapt in {_MODEL}.target_modules",
    f"{_MODEL}.lora_adapter_path": "a run can't begin with given adapters yet",
    f"{_MODEL}.lora": f"adapters have {_MODEL}.lora_rank, lora_alpha and target_modules",
    f"{_MODEL}.lora.adapter_path": "a run can't begin with given adapters yet",
    f"{_MODEL}.tiled_mlp": "tiled layers are not built",
    f"{_MODEL}.mtp": "multi-token prediction is not built",
    f"{_ROLLOUT}.multi_turn": f"use {_ROLLOUT}.agent",
    f"{_ROLLOUT}.agent": f"use {_ROLLOUT}.agent.name, path and max_turns",
    f"{_ROLLOUT}.engine_kwargs": "engine arguments are not passed on; use the keys of rollout",
    f"{_ROLLOUT}.dtype": f"generation runs in the type of {_ACTOR}.mixed_precision",
    f"{_ROLLOUT}.ignore_eos": "generation stops at the end-of-sequence token",
    f"{_ROLLOUT}.data_parallel_size": f"use {_ROLLOUT}.server.replicas",
    f"{_ROLLOUT}.expert_parallel_size": "mixture-of-experts models are not built yet",
    f"{_ROLLOUT}.pipeline_model_parallel_size": f"use {_ROLLOUT}.tensor_model_parallel_size",
    f"{_ROLLOUT}.over_sample_rate": f"use {_ROLLOUT}.over_sampling",
    f"{_ROLLOUT}.scheduling_policy": "the engine takes requests in their order",
    f"{_ROLLOUT}.logprobs_mode": "log-probs are those of the distribution that was sampled from",
    f"{_ROLLOUT}.trace": "traces are not written; set trainer.log_val_generations",
    f"{_ROLLOUT}.prometheus": "the engine's numbers are in the metrics rollout/*",
    f"{_ROLLOUT}.quantization": "generation with quantized weights is not built",
    f"{_ROLLOUT}.quantization_config_file": "generation with quantized weights is not built",
    f"{_ROLLOUT}.qat": "generation with quantized weights is not built",
    f"{_ROLLOUT}.mtp": "multi-token prediction is not built",
    f"{_ROLLOUT}.disaggregation": "prefill and decoding run in one engine",
    f"{_ROLLOUT}.enable_rollout_routing_replay": "mixture-of-experts models are not built yet",
    f"{_ROLLOUT}.router": "requests go to the server with the fewest",
    f"{_ROLLOUT}.limit_images": "images are not supported",
    "algorithm.filter_groups.filter_function": "prompts whose responses differ in "
    "algorithm.filter_groups.metric are kept; own filters are not loaded",
    "algorithm.filter_groups.filter_kwargs": "own filters are not loaded",
    "algorithm.pf_ppo": "it is not built",
    "algorithm.use_pf_ppo": "it is not built",
    **{
        f"{_ROLLOUT}.{name}": "tokens drawn with a penalty would be trained with log-probs "
        "that know nothing of it; leave it out"
        for name in ("repetition_penalty", "presence_penalty", "frequency_penalty")
    },
    f"{_ACTOR}.tis_imp_ratio_cap": "set algorithm.rollout_correction.rollout_is=token and its "
    "rollout_is_threshold",
    "algorithm.rollout_is": "set algorithm.rollout_correction.rollout_is",
    "algorithm.rollout_is_threshold": "set algorithm.rollout_correction.rollout_is_threshold",
    "algorithm.rollout_correction.loss_type": "the loss is that of "
    f"{_ACTOR}.policy_loss.loss_mode; leave it out",
    "algorithm.gdpo_reward_keys": "the estimator gdpo is not built",
    "algorithm.gdpo_reward_weights": "the estimator gdpo is not built",
    "critic": "the keys of the critic are listed in docs/config.md",
    "critic.strategy": f"{_DEEPSPEED}; leave the key out",
    "critic.ulysses_sequence_parallel_size": "sequence parallelism is not built yet",
    "critic.optim.min_lr": "set critic.optim.min_lr_ratio, a share of lr",
    "critic.optim.optimizer": "the optimizer is AdamW",
    "critic.model.external_lib": "model code from outside transformers is not loaded",
    "critic.model.trust_remote_code": "code that comes with a model is never run",
    "critic.model.override_config": "the model's config is taken as it is",
    "critic.model.lora_rank": "all weights of the critic are trained; leave the key out",
    "critic.model.enable_activation_offload": "activation offload is not built; use "
    "critic.model.enable_gradient_checkpointing",
    "reward_model.model": _NO_REWARD_MODEL,
    "reward_model.model_path": _NO_REWARD_MODEL,
    "reward_model.rollout": _NO_REWARD_MODEL,
    "reward_model.n_gpus_per_node": _NO_REWARD_MODEL,
    "reward_model.nnodes": _NO_REWARD_MODEL,
    "reward_model.enable_resource_pool": _NO_REWARD_MODEL,
    "reward_model.reward_manager": "rewards come from the built-in rules or "
    "custom_reward_function.path",
    "reward_model.reward_kwargs": "arguments of a reward manager are not passed on; "
    "reward_model.overlong_buffer penalises long responses",
    "reward_model.sandbox_fusion": "there is no sandbox; use custom_reward_function.path",
    "sandbox_fusion": "there is no sandbox; use custom_reward_function.path",
    "reward": "rewards come from the built-in rules or custom_reward_function.path; this group has "
    "reward.rules, reward.on_error and reward.max_failed_share",
    "custom_reward_function.reward_kwargs": "arguments are not passed on; put them into the "
    "function",
    "distillation": "on-policy distillation is not built",
    "data.custom_cls": "own data classes are not loaded; write JSONL or Parquet",
    "data.datagen": "data are not generated; write JSONL or Parquet",
    "data.gen_batch_size": "generation takes the whole batch; use data.train_batch_size",
    "data.tokenizer": f"the tokenizer comes with {_MODEL}.path",
    "data.sampler": "own samplers are not loaded; use data.shuffle",
    "data.validation_shuffle": "validation keeps the order of the files",
    "data.trust_remote_code": "code that comes with a model is never run",
    "data.tool_config_path": f"use {_ROLLOUT}.agent",
    "data.function_tool_path": f"use {_ROLLOUT}.agent",
    "data.mm_processor_kwargs": "images are not supported",
    "data.use_dynamic_bsz": f"use {_ACTOR}.use_dynamic_bsz and ppo_micro_batch_size_per_gpu",
    "data.max_length": "set data.max_prompt_length and data.max_response_length",
    "data.output_path": "generation alone is not built; use trainer.val_only=true",
    "trainer.balance_batch": "work is always balanced over ranks; leave the key out",
    "trainer.del_local_ckpt_after_load": "use trainer.checkpoint.keep_last",
    "trainer.esi_redundant_time": "use trainer.grace_period_s",
    "trainer.profile_interval": _PROFILER,
    "trainer.v1": f"generation one step ahead is {_ROLLOUT}.one_step_off=true",
    "skip": "steps can't be skipped",
    "async_training": f"generation one step ahead is {_ROLLOUT}.one_step_off=true",
    "rollout": f"servers on nodes of their own are {_ROLLOUT}.nnodes",
    "global_profiler": _PROFILER,
}
"""verl's key, or group of keys -> why it is not supported and what to use. The longest name
counts.
"""

_ENGINES = ("megatron", *_OTHER_ENGINES)
_GENERATORS = ("sglang", "trtllm", "naive")
_ESTIMATORS = (
    "gpg",
    "gdpo",
    "optimal_token_baseline",
    "tir_optimal_token_baseline",
    "rloo_vectorized",
    "grpo_vectorized",
)
_OTHER_ESTIMATORS = {
    "gpg": "set algorithm.adv_estimator=grpo algorithm.norm_adv_by_std_in_grpo=false, with "
    f"{_ACTOR}.policy_loss.loss_mode=gpg",
    "rloo_vectorized": "set algorithm.adv_estimator=rloo",
    "grpo_vectorized": "set algorithm.adv_estimator=grpo",
}


def _refused_values() -> dict[tuple[str, str], str]:
    reasons: dict[tuple[str, str], str] = {}
    for name in _ENGINES:
        reasons[f"{_ACTOR}.strategy", name] = f"{_DEEPSPEED}; leave strategy out"
    for name in _GENERATORS:
        reasons[f"{_ROLLOUT}.name", name] = f"set {_ROLLOUT}.name=vllm, vllm_server or hf"
    for name in _ESTIMATORS:
        reason = _OTHER_ESTIMATORS.get(name, "set algorithm.adv_estimator=grpo, rloo or opo")
        reasons["algorithm.adv_estimator", name] = reason
    reasons["algorithm.filter_groups.max_num_gen_batches", "0"] = (
        "rounds without a bound would never end where no reward varies; set it to 10"
    )
    reasons["algorithm.filter_groups.metric", "seq_final_reward"] = (
        "with the KL taken off every reward differs; set it to acc, score or seq_reward"
    )
    for name in ("sapo", "dppo_tv", "dppo_kl", "bypass_mode"):
        reason = "set it to vanilla, gspo, cispo, gpg, clip_cov, kl_cov or geo_mean"
        reasons[f"{_ACTOR}.policy_loss.loss_mode", name] = reason
    for name in ("clearml", "vemlp_wandb"):
        reasons["trainer.logger", name] = (
            "loggers are console, wandb, tensorboard, mlflow, swanlab and trackio"
        )
    return reasons


REFUSED_VALUES = _refused_values()
"""(our key, value that verl knows) -> what to use here."""


def refused_reason(key: str) -> str | None:
    """Why verl's ``key`` (or the group it lies in) is not supported; None for an unknown key."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        reason = REFUSED.get(".".join(parts[:count]))
        if reason is not None:
            return reason
    return None
