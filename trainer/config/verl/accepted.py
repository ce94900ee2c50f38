"""Settings of verl that change nothing here: accepted, and named in one line at the start."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_ACTOR = "actor_rollout_ref.actor"
_MODEL = "actor_rollout_ref.model"
_REF = "actor_rollout_ref.ref"
_ROLLOUT = "actor_rollout_ref.rollout"
_OFF = ("false", "null", "none", "")


@dataclass(frozen=True)
class Accepted:
    """Why a setting changes nothing here, and for which values that holds."""

    reason: str
    values: tuple[str, ...] | None = None
    """Values, in lower case, for which it holds. None: for any."""

    def holds(self, value: str) -> bool:
        """Whether ``value``, as typed, changes nothing."""
        return self.values is None or value.strip("'\"").lower() in self.values


_NO_RAY = Accepted("there is no Ray: one process per GPU")
_ZERO = Accepted(f"DeepSpeed's ZeRO shards: see {_ACTOR}.zero_stage", ("fsdp", "fsdp2"))
_FSDP = Accepted(f"it tunes FSDP; DeepSpeed's ZeRO shards here: see {_ACTOR}.zero_stage")
_FOLLOWS = Accepted("the reference follows the actor")
_COMPILED = Accepted("the ragged forward is not compiled")
_CHUNKED = Accepted("log-probs and entropy are always computed in chunks")
_PADDING = Accepted("there is no padding to remove")
_NOT_ASKED = Accepted("it is off here as well", _OFF)
_MEMORY = Accepted("the engine always gives its memory back")
_IN_MEMORY = Accepted("weights are handed over in memory")
_PROFILER = Accepted("trainer.profiler says which steps and ranks are profiled, with all phases")

ACCEPTED: Mapping[str, Accepted] = {
    # Ray, queues and services of verl
    "ray_init": _NO_RAY,
    "ray_kwargs": _NO_RAY,
    "transfer_queue": Accepted("batches go from rank to rank directly"),
    "trainer.ray_wait_register_center_timeout": _NO_RAY,
    "trainer.use_v1": Accepted("it chooses between verl's own trainers"),
    "trainer.use_legacy_worker_impl": Accepted("it chooses between verl's own workers"),
    "trainer.v1.trainer_mode": Accepted("generation and training share the GPUs", ("sync",)),
    "trainer.balance_batch": Accepted("work is always balanced over ranks", ("true",)),
    "trainer.max_critic_ckpt_to_keep": Accepted("see trainer.checkpoint.keep_last"),
    "trainer.del_local_ckpt_after_load": _NOT_ASKED,
    "trainer.esi_redundant_time": Accepted("it is off here as well", ("0", *_OFF)),
    "trainer.profile_interval": Accepted("the profiler is off", ("[-1,-1]", *_OFF)),
    "global_profiler.profile_continuous_steps": _NOT_ASKED,
    "global_profiler.relocate_results": _NOT_ASKED,
    "global_profiler.finish_hook_cmd": _NOT_ASKED,
    "actor_rollout_ref.nccl_timeout": Accepted("waits for other ranks are bounded anyway"),
    # training engine
    "engine": Accepted(_ZERO.reason, ("fsdp", "fsdp2")),
    "model_engine": Accepted(_ZERO.reason, ("fsdp", "fsdp2", "dp")),
    f"{_ACTOR}.strategy": _ZERO,
    f"{_ACTOR}.fsdp_config.wrap_policy": _FSDP,
    f"{_ACTOR}.fsdp_config.offload_policy": _FSDP,
    f"{_ACTOR}.fsdp_config.reshard_after_forward": _FSDP,
    f"{_ACTOR}.fsdp_config.fsdp_size": _FSDP,
    f"{_ACTOR}.fsdp_config.forward_prefetch": _FSDP,
    f"{_ACTOR}.fsdp_config.use_orig_params": _FSDP,
    f"{_ACTOR}.fsdp_config.use_no_sync_for_gradient_accumulation": _FSDP,
    f"{_ACTOR}.fsdp_config.seed": Accepted("seeds follow trainer.seed"),
    f"{_ACTOR}.fsdp_config.full_determinism": Accepted("runs repeat bit by bit on one machine"),
    f"{_ACTOR}.fsdp_config.model_dtype": Accepted(
        f"weights are trained in fp32 and computed in {_ACTOR}.mixed_precision"
    ),
    f"{_ACTOR}.fsdp_config.dtype": Accepted(f"see {_ACTOR}.mixed_precision", ("bfloat16", "bf16")),
    f"{_ACTOR}.fsdp_config.use_torch_compile": _COMPILED,
    f"{_ACTOR}.fsdp_config.entropy_checkpointing": _CHUNKED,
    f"{_ACTOR}.fsdp_config.entropy_from_logits_with_chunking": _CHUNKED,
    f"{_ACTOR}.fsdp_config.entropy_from_logits_chunk_size": _CHUNKED,
    f"{_ACTOR}.fsdp_config.pad_to_length": _NOT_ASKED,
    f"{_ACTOR}.use_torch_compile": _COMPILED,
    f"{_ACTOR}.use_fused_kernels": _CHUNKED,
    f"{_ACTOR}.use_remove_padding": _PADDING,
    f"{_ACTOR}.entropy_checkpointing": _CHUNKED,
    f"{_ACTOR}.entropy_from_logits_with_chunking": _CHUNKED,
    f"{_ACTOR}.entropy_from_logits_chunk_size": _CHUNKED,
    f"{_ACTOR}.calculate_entropy": Accepted("the entropy is always reported"),
    f"{_ACTOR}.calculate_sum_pi_squared": _NOT_ASKED,
    f"{_ACTOR}.use_prefix_grouper": Accepted(f"see {_ACTOR}.share_prompt: a prompt is shared"),
    f"{_ACTOR}.pad_to_length": _NOT_ASKED,
    f"{_ACTOR}.rollout_n": Accepted(f"it follows {_ROLLOUT}.n"),
    f"{_ACTOR}.data_loader_seed": Accepted("seeds follow trainer.seed"),
    f"{_ACTOR}.freeze_vision_tower": Accepted("models have no vision tower here"),
    f"{_ACTOR}.load_weight": Accepted("weights are always loaded"),
    f"{_ACTOR}.loss_scale_factor": _NOT_ASKED,
    f"{_ACTOR}.tau_pos": Accepted("only the policy loss sapo reads it"),
    f"{_ACTOR}.tau_neg": Accepted("only the policy loss sapo reads it"),
    f"{_ACTOR}.policy_loss.tau_pos": Accepted("only the policy loss sapo reads it"),
    f"{_ACTOR}.policy_loss.tau_neg": Accepted("only the policy loss sapo reads it"),
    f"{_ACTOR}.qat.enable": _NOT_ASKED,
    f"{_ACTOR}.router_replay.mode": Accepted("it is off here as well", ("disabled", *_OFF)),
    f"{_ACTOR}.optim.optimizer": Accepted("the optimizer is AdamW", ("adamw",)),
    f"{_ACTOR}.optim.optimizer_impl": Accepted("the optimizer is AdamW", ("torch.optim",)),
    f"{_ACTOR}.optim.override_optimizer_config": _NOT_ASKED,
    f"{_ACTOR}.optim.num_cycles": Accepted("the cosine falls once", ("0.5",)),
    f"{_ACTOR}.optim.zero_indexed_step": Accepted("see lr_warmup_steps for where it begins"),
    f"{_ACTOR}.checkpoint.load_contents": Accepted("a checkpoint is loaded whole"),
    f"{_ACTOR}.checkpoint.strict": Accepted("a checkpoint is always verified"),
    f"{_ACTOR}.profiler": _PROFILER,
    "actor_rollout_ref.profiler": _PROFILER,
    # reference
    f"{_REF}.fsdp_config": _FOLLOWS,
    f"{_REF}.strategy": Accepted(_FOLLOWS.reason, ("fsdp", "fsdp2")),
    f"{_REF}.use_torch_compile": _COMPILED,
    f"{_REF}.use_remove_padding": _PADDING,
    f"{_REF}.entropy_checkpointing": _CHUNKED,
    f"{_REF}.entropy_from_logits_with_chunking": _CHUNKED,
    f"{_REF}.entropy_from_logits_chunk_size": _CHUNKED,
    f"{_REF}.ulysses_sequence_parallel_size": _FOLLOWS,
    f"{_REF}.pad_to_length": _NOT_ASKED,
    f"{_REF}.rollout_n": _FOLLOWS,
    f"{_REF}.router_replay.mode": Accepted("it is off here as well", ("disabled", *_OFF)),
    f"{_REF}.profiler": _PROFILER,
    # model
    f"{_MODEL}.use_remove_padding": _PADDING,
    f"{_MODEL}.use_fused_kernels": _CHUNKED,
    f"{_MODEL}.fused_kernel_options": _CHUNKED,
    f"{_MODEL}.use_liger": Accepted("liger kernels are not used"),
    f"{_MODEL}.use_shm": Accepted("a model is read from its folder, once for a node"),
    f"{_MODEL}.enable_activation_offload": _NOT_ASKED,
    f"{_MODEL}.exclude_modules": Accepted("no module is left out", ("dont_exclude", "[]", *_OFF)),
    f"{_MODEL}.lora_adapter_path": _NOT_ASKED,
    f"{_MODEL}.lora.adapter_path": _NOT_ASKED,
    f"{_MODEL}.lora.merge": Accepted("the engine always gets the merged weights"),
    f"{_MODEL}.lora.type": Accepted("adapters are LoRA", ("lora",)),
    f"{_MODEL}.lora.dropout": Accepted("adapters have no dropout", ("0", "0.0")),
    f"{_MODEL}.external_lib": _NOT_ASKED,
    f"{_MODEL}.tiled_mlp.enabled": _NOT_ASKED,
    f"{_MODEL}.tiled_mlp.num_shards": Accepted("tiled_mlp is off"),
    f"{_MODEL}.mtp.enable": _NOT_ASKED,
    # rollout
    f"{_ROLLOUT}.mode": Accepted("one engine serves both"),
    f"{_ROLLOUT}.dtype": Accepted(f"see {_ACTOR}.mixed_precision", ("bfloat16", "auto")),
    f"{_ROLLOUT}.seed": Accepted("seeds follow trainer.seed"),
    f"{_ROLLOUT}.full_determinism": Accepted("random numbers depend on the sample alone"),
    f"{_ROLLOUT}.ignore_eos": _NOT_ASKED,
    f"{_ROLLOUT}.enforce_eager": Accepted("the engine decides it"),
    f"{_ROLLOUT}.cudagraph_capture_sizes": Accepted("the engine decides it"),
    f"{_ROLLOUT}.free_cache_engine": _MEMORY,
    f"{_ROLLOUT}.multi_stage_wake_up": _MEMORY,
    f"{_ROLLOUT}.load_format": _IN_MEMORY,
    f"{_ROLLOUT}.layered_summon": _IN_MEMORY,
    f"{_ROLLOUT}.checkpoint_engine": _IN_MEMORY,
    f"{_ROLLOUT}.update_weights_bucket_megabytes": _IN_MEMORY,
    f"{_ROLLOUT}.enable_prefix_caching": Accepted("prompts of a group are always shared"),
    f"{_ROLLOUT}.scheduling_policy": Accepted("the engine decides it", ("fcfs",)),
    f"{_ROLLOUT}.logprobs_mode": Accepted("it is so here", ("processed_logprobs",)),
    f"{_ROLLOUT}.disable_log_stats": Accepted("the engine's numbers are in rollout/*"),
    f"{_ROLLOUT}.skip_tokenizer_init": Accepted("the engine exchanges token ids"),
    f"{_ROLLOUT}.max_model_len": Accepted(
        "it is data.max_prompt_length + data.max_response_length"
    ),
    f"{_ROLLOUT}.n_gpus_per_node": Accepted("it follows trainer.n_gpus_per_node"),
    f"{_ROLLOUT}.data_parallel_size": Accepted("every rank has an engine", ("1",)),
    f"{_ROLLOUT}.expert_parallel_size": Accepted("it is so here", ("1",)),
    f"{_ROLLOUT}.pipeline_model_parallel_size": Accepted("it is so here", ("1",)),
    f"{_ROLLOUT}.multi_turn.enable": _NOT_ASKED,
    f"{_ROLLOUT}.over_sample_rate": Accepted("it is off here as well", ("0", "0.0")),
    f"{_ROLLOUT}.agent.num_workers": Accepted("turns need no processes of their own"),
    f"{_ROLLOUT}.agent.default_agent_loop": Accepted("it is so here", ("single_turn_agent",)),
    f"{_ROLLOUT}.trace": Accepted("generations of validation are logged", _OFF),
    f"{_ROLLOUT}.trace.token2text": Accepted("tracing is off"),
    f"{_ROLLOUT}.prometheus.enable": _NOT_ASKED,
    f"{_ROLLOUT}.profiler": _PROFILER,
    f"{_ROLLOUT}.quantization": _NOT_ASKED,
    f"{_ROLLOUT}.engine_kwargs": Accepted("there is nothing in it", ("{}", *_OFF)),
    f"{_ROLLOUT}.enable_rollout_routing_replay": _NOT_ASKED,
    # critic and rewards
    "critic.model.tokenizer_path": Accepted("the critic reads the policy's tokens"),
    "critic.model.override_config": Accepted("there is nothing in it", ("{}", *_OFF)),
    "critic.model.external_lib": _NOT_ASKED,
    "critic.model.trust_remote_code": _NOT_ASKED,
    "critic.model.use_shm": Accepted("models are read where they are"),
    "critic.model.use_remove_padding": _PADDING,
    "critic.model.enable_activation_offload": _NOT_ASKED,
    "critic.model.lora_rank": Accepted("all weights of the critic are trained", ("0",)),
    "critic.model.lora_alpha": Accepted("all weights of the critic are trained"),
    "critic.model.target_modules": Accepted("all weights of the critic are trained"),
    "critic.model.fsdp_config": _FSDP,
    "critic.fsdp": _FSDP,
    "critic.strategy": Accepted("see critic.zero_stage for how it is sharded", _ZERO.values),
    "critic.rollout_n": Accepted(f"it follows {_ROLLOUT}.n"),
    "critic.ulysses_sequence_parallel_size": Accepted("sequences are not split", ("1",)),
    "critic.checkpoint": Accepted("the critic is saved with the policy"),
    "critic.profiler": _PROFILER,
    "reward.num_workers": Accepted("reward functions have processes of their own on each rank"),
    "reward_model.num_workers": Accepted("reward functions have processes of their own"),
    "reward.reward_manager.source": Accepted("the reward manager is verl's own", ("register",)),
    "reward.reward_manager.name": Accepted("each response is scored by itself", ("naive",)),
    "reward_model.reward_manager": Accepted(
        "each response is scored by itself; dapo's penalty is reward_model.overlong_buffer",
        ("naive", "dapo", *_OFF),
    ),
    "reward_model.overlong_buffer.log": Accepted("the penalty is always logged"),
    "reward_model.launch_reward_fn_async": Accepted("rewards run beside the generation"),
    "reward_model.enable_resource_pool": _NOT_ASKED,
    "algorithm.use_pf_ppo": _NOT_ASKED,
    "algorithm.pf_ppo": Accepted("use_pf_ppo is off"),
    "algorithm.rollout_correction.loss_type": Accepted("it is so here", ("ppo_clip",)),
    "distillation.enabled": _NOT_ASKED,
    # data
    "data.return_raw_chat": Accepted("the chat is kept anyway"),
    "data.return_raw_input_ids": Accepted("sampled ids are kept anyway"),
    "data.return_full_prompt": Accepted("the prompt is kept anyway"),
    "data.return_multi_modal_inputs": Accepted("data are text"),
    "data.image_key": Accepted("data are text; rows with images are refused"),
    "data.video_key": Accepted("data are text; rows with videos are refused"),
    "data.audio_key": Accepted("data are text; rows with sounds are refused"),
    "data.image_patch_size": Accepted("data are text"),
    "data.use_shm": Accepted("data files are mapped into memory"),
    "data.trust_remote_code": _NOT_ASKED,
    "data.validation_shuffle": _NOT_ASKED,
    "data.filter_overlong_prompts_workers": Accepted("see data.num_workers"),
    "data.tokenizer": _NOT_ASKED,
    "data.gen_batch_size": _NOT_ASKED,
    "data.custom_cls.path": _NOT_ASKED,
    "data.custom_cls.name": Accepted("data.custom_cls.path is null"),
    "data.tool_config_path": _NOT_ASKED,
    "data.function_tool_path": _NOT_ASKED,
    "data.micro_batch_size_per_gpu": Accepted(
        f"micro-batches are cut by tokens: see {_ACTOR}.ppo_max_token_len_per_gpu"
    ),
    "data.use_dynamic_bsz": Accepted("micro-batches are cut by tokens", ("true",)),
    "data.pad_mode": Accepted("there is no padding"),
    "data.balance_dp_token": Accepted("work is always balanced over ranks"),
    "data.ignore_input_ids_mismatch": Accepted("turns are joined as token ids"),
}
"""verl's key, or group of keys -> why it changes nothing here, and for which values. The longest
name counts; keys that a run has are in none of these groups.
"""


def accepted_reason(key: str, value: str) -> str | None:
    """Why verl's ``key=value`` changes nothing here; None when it does, or is not supported."""
    parts = key.split(".")
    for count in range(len(parts), 0, -1):
        rule = ACCEPTED.get(".".join(parts[:count]))
        if rule is not None:
            return rule.reason if rule.holds(value) else None
    return None
