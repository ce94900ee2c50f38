"""One error that lists everything wrong, each with what to type instead."""

from __future__ import annotations

import re

import pytest

from tests.config.helpers import minimal_settings, problems, put
from trainer.base.errors import UserError
from trainer.config import load
from trainer.config.checks.cross import cross_checks
from trainer.config.checks.no_effect import no_effect_hints

A, R, T = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer"
M = "actor_rollout_ref.model"
GAE = {"trainer.mode": "rl", "algorithm.adv_estimator": "gae"}
STATIC = {f"{A}.use_dynamic_bsz": False, f"{A}.ppo_micro_batch_size_per_gpu": 8}


def test_smallest_run_loads_with_verls_names():
    config = load(minimal_settings())
    assert config.actor_rollout_ref.actor.ppo_max_token_len_per_gpu == 16384
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == config.data.train_batch_size
    assert config.trainer.default_local_dir == "runs/plimsoll/run"
    assert cross_checks(config) == []


def test_keys_that_follow_another_follow_it():
    config = load(
        minimal_settings(
            **{f"{A}.ppo_max_token_len_per_gpu": 8192, f"{A}.clip_ratio": 0.1, "trainer.seed": 5}
        )
    )
    ref = config.actor_rollout_ref
    assert ref.ref.log_prob_max_token_len_per_gpu == 8192
    assert ref.rollout.max_num_batched_tokens == 8192
    assert (
        config.critic.ppo_max_token_len_per_gpu
        == config.critic.forward_max_token_len_per_gpu
        == 16384
    )
    assert (ref.actor.clip_ratio_low, ref.actor.clip_ratio_high, config.data.seed) == (0.1, 0.1, 5)


@pytest.mark.parametrize("budget", [4096, [4096], "auto"])
def test_budget_is_a_number_a_list_or_auto(budget: object):
    assert (
        load(
            minimal_settings(**{f"{A}.ppo_max_token_len_per_gpu": budget})
        ).actor_rollout_ref.actor.ppo_max_token_len_per_gpu
        == budget
    )


BAD = [
    # types and ranges
    (
        {"data.train_batch_size": "x"},
        "data.train_batch_size=x: expected a whole number (at least 1)",
    ),
    ({"data.train_batch_size": True}, "data.train_batch_size=true: expected a whole number"),
    ({f"{A}.optim.lr": -1.0}, f"{A}.optim.lr=-1.0: expected a number (at least 0)"),
    ({f"{A}.optim.lr": float("nan")}, f"{A}.optim.lr=nan: expected a number"),
    ({f"{A}.optim.betas": [0.9]}, f"{A}.optim.betas=[0.9]: expected a list of a number"),
    ({f"{A}.zero_stage": 4}, "expected a whole number (at least 0, at most 3)"),
    ({"data.truncation": "middel"}, "expected one of error, left, right, middle"),
    ({"trainer.process_on_nodes": "[8]*4"}, "this is a text; write every item, such as [8,8]"),
    ({"trainer.checkpoint": None}, "trainer.checkpoint=null: expected a group of keys"),
    ({"critic": 3}, "critic=3: expected a group of keys"),
    ({"data.seed": "${data.foo}"}, "Interpolation key 'data.foo' not found"),
    (
        {"trainer.seed": 10**12},
        "trainer.seed=1000000000000: expected a whole number (at least 0, at most 4294967295)",
    ),
    ({"data.val_files": []}, "data.val_files=[]: expected a text or a list of a text or null"),
    # keys
    (
        {"data.train_batchsize": 4},
        "unknown key data.train_batchsize; did you mean data.train_batch_size?",
    ),
    (
        {"actor.ppo_mini_batch_size": 4},
        f"unknown key actor.ppo_mini_batch_size; did you mean {A}.ppo_mini_batch_size?",
    ),
    ({"zzz": 4}, "unknown key zzz; docs/config.md lists all keys"),
    ({f"{A}.ppo_micro_batch_size": 4}, f"deprecated; use {A}.ppo_micro_batch_size_per_gpu"),
    (
        {f"{A}.strategy": "megatron"},
        f"{A}.strategy=megatron is not supported: DeepSpeed is the only training engine",
    ),
    (
        {f"{A}.fsdp_config.some_key": 0},
        f"{A}.fsdp_config.some_key=0 is not supported: DeepSpeed",
    ),
    (
        {f"{R}.multi_turn.enable": True},
        f"{R}.multi_turn.enable=true is not supported: use actor_rollout_ref.rollout.agent",
    ),
    ({"algorithm.adv_estimator": "gdpo"}, "algorithm.adv_estimator=gdpo is not supported: set"),
    (
        {"trainer.save_freq": 3, "trainer.checkpoint.save_freq": 4},
        "trainer.save_freq is another name of",
    ),
    # sources
    ({"data.train_files": "x.jsonl"}, "data.task=arithmetic and data.train_files are both set"),
    (
        {"data.task": None},
        "nothing to train on: set data.task=arithmetic, or data.train_files=FILE.jsonl",
    ),
    (
        {"data.task": None, "data.train_files": "x", "trainer.test_freq": 5},
        "trainer.test_freq=5, but there is nothing",
    ),
    ({"actor_rollout_ref.model.path": None}, "no model: set actor_rollout_ref.model.path"),
    # what isn't built
    ({f"{R}.gpu_memory_utilization": 0.5}, f"{R}.gpu_memory_utilization=0.5 is read by vllm only"),
    ({f"{R}.max_num_batched_tokens": 77}, f"{R}.max_num_batched_tokens=77 is read by vllm only"),
    ({f"{R}.timeout_s": 5.0}, f"{R}.timeout_s=5.0 is for an engine with processes of its own"),
    ({f"{R}.one_step_off": True, f"{R}.name": "vllm_server"}, "set algorithm.max_staleness=1"),
    ({f"{R}.server.replicas": 2}, f"{R}.server.replicas=2, but {R}.name=hf starts no server"),
    ({f"{R}.agent.path": "x.py"}, f"{R}.agent.path=x.py needs {R}.agent.name"),
    ({f"{R}.agent.name": "calculator", f"{R}.agent.max_turns": 1}, f"{R}.agent.max_turns=1 leaves"),
    (
        {f"{R}.agent.name": "calculator", f"{R}.agent.max_observation_length": 4096},
        "fills the whole response",
    ),
    ({"algorithm.max_staleness": 1}, "algorithm.max_staleness=1 does nothing here"),
    ({f"{R}.tensor_model_parallel_size": 2}, f"{R}.tensor_model_parallel_size=2"),
    (
        {f"{A}.ulysses_sequence_parallel_size": 2, "trainer.n_gpus_per_node": 2},
        f"{A}.ulysses_sequence_parallel_size=2",
    ),
    ({"actor_rollout_ref.hybrid_engine": False}, "actor_rollout_ref.hybrid_engine=false"),
    (
        {"actor_rollout_ref.model.trust_remote_code": True},
        "actor_rollout_ref.model.trust_remote_code=true",
    ),
    (
        {"algorithm.adv_estimator": "gae", "critic.enable": False},
        "algorithm.adv_estimator=gae needs the values of a critic",
    ),
    ({"critic.enable": True}, "critic.enable=true, but algorithm.adv_estimator=grpo reads no"),
    (
        {**GAE, "critic.param_offload": True},
        "critic.param_offload=true needs critic.zero_stage=3 (now 1)",
    ),
    (
        {
            **GAE,
            "critic.zero_stage": 0,
            "critic.optimizer_offload": True,
            f"{A}.mixed_precision": "fp32",
        },
        "critic.optimizer_offload=true needs critic.zero_stage=1 or more",
    ),
    ({**GAE, "critic.zero_stage": 0}, "critic.zero_stage=0 with"),
    (
        {**GAE, "critic.ppo_mini_batch_size": 3},
        "is not a multiple of critic.ppo_mini_batch_size=3; nearest valid: critic.ppo_mini",
    ),
    (
        {**GAE, "critic.forward_max_token_len_per_gpu": 10},
        "critic.forward_max_token_len_per_gpu=10 holds fewer tokens than one sequence",
    ),
    (
        {**GAE, "critic.use_dynamic_bsz": False},
        "critic.use_dynamic_bsz=false needs critic.ppo_micro_batch_size_per_gpu",
    ),
    (
        {**GAE, "critic.optim.lr_warmup_steps": 3, "critic.optim.lr_warmup_steps_ratio": 0.1},
        "critic.optim.lr_warmup_steps=3 and lr_warmup_steps_ratio=0.1 are both set",
    ),
    (
        {**GAE, "trainer.total_training_steps": 5, "trainer.critic_warmup": 5},
        "trainer.critic_warmup=5 leaves no step of trainer.total_training_steps=5",
    ),
    ({"reward_model.enable": True}, "reward_model.enable=true"),
    ({"data.use_packed_dataset": False}, "data.use_packed_dataset=false"),
    ({"trainer.checkpoint.atomic_save": False}, "trainer.checkpoint.atomic_save=false"),
    ({f"{A}.checkpoint.save_contents": ["model"]}, "save_contents lacks optimizer, extra"),
    (
        {f"{A}.checkpoint.save_contents": ["model", "optimizer", "extra", "hf_model"]},
        "set trainer.export_hf=true",
    ),
    # budgets
    (
        {f"{A}.dynamic_bsz_bucketing": True, f"{A}.share_prompt": "never"},
        f"{A}.share_prompt=never: expected",
    ),
    (
        {f"{A}.use_dynamic_bsz": False},
        f"{A}.use_dynamic_bsz=false needs {A}.ppo_micro_batch_size_per_gpu",
    ),
    (
        {f"{A}.ppo_max_token_len_per_gpu": 512},
        "data.max_prompt_length=512 + data.max_response_length=512 = 1024",
    ),
    (
        {"actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 9},
        "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=9",
    ),
    ({f"{A}.ppo_max_token_len_per_gpu": [4096, 4096]}, "lists 2 budgets for 1 rank(s)"),
    ({f"{A}.bucket_boundaries": [64, 64]}, f"{A}.bucket_boundaries=[64, 64] must rise; set [64]"),
    # batch sizes
    (
        {"data.train_batch_size": 10, f"{A}.ppo_mini_batch_size": 4},
        "nearest valid: train_batch_size=8 or 12, or ppo_mini",
    ),
    (
        {"data.train_batch_size": 2, f"{A}.ppo_mini_batch_size": 4},
        "is more than data.train_batch_size=2",
    ),
    (
        {"data.train_batch_size": 4, "trainer.n_gpus_per_node": 3},
        "don't divide over dp=3 ranks (10.67 each)",
    ),
    # sampling
    ({f"{R}.n": 1}, "grpo compares responses of one prompt"),
    (
        {f"{R}.temperature": 0.0},
        "expected a number (at least 0.001, at most 1000.0)",
    ),
    ({f"{R}.do_sample": False}, "without sampling there is nothing to learn from"),
    ({f"{R}.val_kwargs.n": 4}, "4 equal answers"),
    ({f"{R}.response_length": 9}, "set data.max_response_length only"),
    # engine
    (
        {f"{A}.param_offload": True, f"{A}.zero_stage": 1},
        f"needs {A}.zero_stage=3",
    ),
    (
        {f"{A}.optimizer_offload": True, f"{A}.zero_stage": 0, f"{A}.mixed_precision": "fp32"},
        f"needs {A}.zero_stage=1",
    ),
    ({f"{A}.zero_stage": 0, f"{A}.mixed_precision": "bf16"}, f"set {A}.zero_stage=1"),
    ({f"{A}.grad_offload": True}, f"goes with {A}.optimizer_offload=true"),
    ({f"{A}.optim.lr_warmup_steps": 3, f"{A}.optim.lr_warmup_steps_ratio": 0.1}, "are both set"),
    # machines and resuming
    ({"trainer.nnodes": 2, "trainer.process_on_nodes": [1]}, "set trainer.process_on_nodes=[1,1]"),
    ({"trainer.process_on_nodes": [2]}, "differs from trainer.n_gpus_per_node=1"),
    ({"trainer.resume_mode": "path"}, "needs trainer.resume_from_path"),
    ({"trainer.resume_from_path": "x"}, "set resume_mode=path"),
    (
        {"actor_rollout_ref.ref.ema_interval": 5},
        "no reference is used: set actor_rollout_ref.actor.use_kl_loss=true",
    ),
    # LoRA
    ({f"{M}.lora_rank": -1}, f"{M}.lora_rank=-1: expected a whole number (at least 0)"),
    ({f"{M}.lora_rank": 8, f"{M}.lora_alpha": 0}, f"{M}.lora_alpha=0: expected a number (above 0)"),
    ({f"{M}.lora_alpha": 32}, f"{M}.lora_alpha=32.0, but {M}.lora_rank=0 trains all weights"),
    ({f"{M}.target_modules": ["q_proj"]}, f"{M}.target_modules=[q_proj], but {M}.lora_rank=0"),
    ({f"{M}.lora_rank": 8, f"{M}.target_modules": "q_proj"}, "target_modules=q_proj: expected"),
    ({f"{M}.lora_rank": 8, f"{M}.target_modules": []}, "target_modules=[]: expected"),
    (
        {f"{M}.lora_rank": 8, f"{A}.use_kl_loss": True, "actor_rollout_ref.ref.ema_interval": 5},
        "the reference of LoRA is the model without its adapters",
    ),
    ({"trainer.checkpoint.best_mode": "min"}, "but of what? Set trainer.checkpoint.best_metric"),
    (
        {"trainer.checkpoint.best_metric": "actor/entropy"},
        "Set trainer.checkpoint.best_mode=max or min",
    ),
    ({"trainer.checkpoint.best_mode": "mni"}, "expected one of max, min"),
    # what other keys leave without effect
    ({f"{A}.grad_clip_adaptive": True, f"{A}.grad_clip": 0.0}, f"{A}.grad_clip=0 clips nothing"),
    (
        {f"{A}.clip_ratio": 0.1, f"{A}.clip_ratio_low": 0.2, f"{A}.clip_ratio_high": 0.3},
        f"{A}.clip_ratio=0.1, but",
    ),
    ({f"{R}.agent.turn_timeout_s": 3.0}, f"{R}.agent.name=null is one turn"),
    ({"trainer.rollback.patience": 2}, "trainer.rollback.enable=false never rolls back"),
    (
        {
            "trainer.rollback.enable": True,
            "trainer.test_freq": 1,
            "trainer.checkpoint.keep_best": 0,
        },
        "keep_best=0 keeps none",
    ),
    ({"trainer.rollback.enable": True}, "trainer.test_freq=-1 makes none while it trains"),
    (
        {"trainer.checkpoint.best_metric": "val/reward", "trainer.checkpoint.keep_best": 0},
        "keeps no best one",
    ),
    (
        {"custom_reward_function.name": "f"},
        "custom_reward_function.name=f, but custom_reward_function.path=null",
    ),
    (
        {"reward.rules": {"a/b": "maths"}, "custom_reward_function.path": "reward.py"},
        "reward.rules has no effect with custom_reward_function.path=reward.py",
    ),
    (
        {"reward_model.overlong_buffer.enable": True},
        "reward_model.overlong_buffer.len=4096 is more than data.max_response_length=",
    ),
    ({"reward.on_error": "skip"}, "reward.on_error=skip: expected"),
    ({"reward.max_failed_share": 1.5}, "reward.max_failed_share=1.5: expected"),
    (
        {"trainer.checkpoint.write_share": 0.5, "trainer.checkpoint.async_save": False},
        "write_share=0.5, but",
    ),
    (
        {"trainer.mode": "sft", f"{A}.entropy_coeff": 0.01},
        f"{A}.entropy_coeff=0.01, but trainer.mode=sft learns",
    ),
    (
        {"trainer.mode": "sft", f"{R}.over_sampling": 1.5},
        f"{R}.over_sampling=1.5, but trainer.mode=sft learns",
    ),
]


@pytest.mark.parametrize(("changes", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_each_bad_input_has_its_one_message(changes: dict[str, object], message: str):
    messages = problems(minimal_settings(**changes))
    assert len(messages) == 1 and message in messages[0], messages


SWITCHED_OFF: list[tuple[dict[str, object], str]] = [
    ({f"{A}.kl_loss_coef": 0.01}, f"{A}.kl_loss_coef=0.01, but {A}.use_kl_loss=false"),
    ({f"{A}.kl_loss_type": "k1"}, f"{A}.kl_loss_type=k1, but {A}.use_kl_loss=false"),
    (
        {"actor_rollout_ref.ref.ema_decay": 0.9},
        "set it to a number of steps, or leave ema_decay out",
    ),
    ({f"{A}.grad_clip_min_batch_size": 16}, f"{A}.grad_clip_adaptive=false clips all steps alike"),
    (
        {**STATIC, f"{A}.dynamic_bsz_bucketing": True},
        f"dynamic_bsz_bucketing=true, but {A}.use_dynamic_bsz=false",
    ),
    (
        {**STATIC, f"{A}.share_prompt": True},
        f"{A}.share_prompt=true, but {A}.use_dynamic_bsz=false",
    ),
    (
        {f"{A}.optim.min_lr_ratio": 0.1},
        "lr_scheduler_type=constant never falls: set it to linear or cosine",
    ),
    (
        {f"{R}.val_kwargs.temperature": 0.6},
        f"{R}.val_kwargs.do_sample=false takes the likeliest token",
    ),
    ({f"{R}.server.start_timeout_s": 3.0}, f"{R}.name=hf starts no server"),
]


@pytest.mark.parametrize(
    ("changes", "message"), SWITCHED_OFF, ids=[message[:40] for _, message in SWITCHED_OFF]
)
def test_keys_that_a_sweep_over_their_switch_carries_along_give_a_hint(
    changes: dict[str, object], message: str
):
    (hint,) = no_effect_hints(load(minimal_settings(**changes)))
    assert message in hint


def test_all_problems_are_reported_together():
    tree = minimal_settings()
    for changes, _ in (BAD[0], BAD[2], BAD[11], BAD[15]):
        for key, value in changes.items():
            put(tree, key, value)
    with pytest.raises(UserError, match="4 problems in the settings") as error:
        load(tree)
    assert all(message in str(error.value) for _, message in (BAD[0], BAD[2], BAD[11], BAD[15]))


def test_contradictions_are_reported_together():
    changes = {
        f"{A}.param_offload": True,
        f"{A}.zero_stage": 1,
        f"{A}.use_dynamic_bsz": False,
        "data.train_batch_size": 5,
    }
    assert (
        len(
            problems(
                minimal_settings(
                    **changes, **{f"{A}.ppo_mini_batch_size": 2, "trainer.n_gpus_per_node": 3}
                )
            )
        )
        == 4
    )


def test_a_verl_snippet_for_grpo_runs_unchanged_where_it_asks_for_what_we_do():
    snippet = {
        "algorithm.use_kl_in_reward": False,
        "data.filter_overlong_prompts": True,
        "actor_rollout_ref.model.use_remove_padding": True,
        f"{A}.fsdp_config.param_offload": False,
        f"{A}.fsdp_config.optimizer_offload": False,
        f"{A}.use_kl_loss": True,
        f"{A}.kl_loss_type": "low_var_kl",
        f"{A}.entropy_coeff": 0,
        f"{A}.optim.warmup_style": "cosine",
        "actor_rollout_ref.ref.fsdp_config.param_offload": False,
        "trainer.critic_warmup": 0,
        "trainer.save_freq": 20,
        "trainer.resume_mode": "disable",
        "trainer.use_hybrid_engine": True,
        "actor_rollout.backend": "hybrid",
        "algorithm.kl_ctrl.type": "kl_controller",
    }
    config = load(minimal_settings(**snippet))
    assert config.trainer.checkpoint.save_freq == 20
    assert config.actor_rollout_ref.actor.optim.lr_scheduler_type == "cosine"
    assert config.algorithm.kl_ctrl.type == "adaptive"


def test_keys_without_effect_in_such_a_snippet_give_hints_at_the_start():
    loading = {
        "data.num_workers": 0,
        "data.prefetch_factor": 8,
        "data.filter_overlong_prompts": True,
    }
    assert (
        len(no_effect_hints(load(minimal_settings(**loading, **{"data.truncation": "left"})))) == 2
    )
    snippet = {
        f"{A}.bucket_boundaries": [64, 256],
        f"{A}.kl_loss_coef": 0.0,
        "algorithm.lam": 0.95,
        "algorithm.kl_penalty": "kl",
        "algorithm.kl_ctrl.target_kl": 0.1,
        "critic.ppo_max_token_len_per_gpu": 98304,
        "critic.optim.lr": 2.0e-5,
        "trainer.critic_warmup": 3,
    }
    assert no_effect_hints(load(minimal_settings())) == []
    follows = {f"{A}.ppo_max_token_len_per_gpu": 4096, f"{A}.ppo_epochs": 2, "trainer.mode": "rl"}
    assert no_effect_hints(load(minimal_settings(**follows))) == []
    hints = no_effect_hints(load(minimal_settings(**snippet)))
    assert sorted(line.split("=")[0].removeprefix("[HINT] ") for line in hints) == sorted(
        key for key in snippet if key not in (f"{A}.kl_loss_coef", "algorithm.kl_penalty")
    )
    used = {
        "algorithm.use_kl_in_reward": True,
        f"{A}.dynamic_bsz_bucketing": True,
        "algorithm.kl_ctrl.type": "adaptive",
    }
    assert len(no_effect_hints(load(minimal_settings(**snippet, **used)))) == 4
    assert len(no_effect_hints(load(minimal_settings(**snippet, **used, **GAE)))) == 0


def test_other_values_of_those_keys_are_refused():
    assert "not supported" in problems(minimal_settings(**{"critic.rollout_m": 3}))[0]
    assert (
        "expected true or false"
        in problems(minimal_settings(**{"actor_rollout.backend": "split"}))[0]
    )


def test_static_baseline_needs_no_budget():
    changes = {
        f"{A}.use_dynamic_bsz": False,
        f"{A}.ppo_micro_batch_size_per_gpu": 8,
        f"{A}.ppo_max_token_len_per_gpu": 9,
    }
    assert problems(minimal_settings(**changes)) == []


def test_a_plan_may_lack_data_and_model():
    assert (
        load({"actor_rollout_ref": {"rollout": {"n": 2}}}, complete=False).data.train_files is None
    )


def test_a_kl_in_the_loss_and_in_the_reward_is_said() -> None:
    both = {"actor_rollout_ref.actor.use_kl_loss": True, "algorithm.use_kl_in_reward": True}
    (hint,) = no_effect_hints(load(minimal_settings(**both)))
    assert hint.startswith("[HINT] the KL to the reference counts twice: ")
    for key, value in both.items():
        assert no_effect_hints(load(minimal_settings(**{key: value}))) == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"actor_rollout_ref.actor.policy_loss.loss_mode": "gspo"},
            "actor_rollout_ref.actor.loss_agg_mode=token-mean: the loss gspo is a mean over "
            "responses; set actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean",
        ),
        (
            {
                "actor_rollout_ref.actor.policy_loss.loss_mode": "clip-cov",
                "actor_rollout_ref.actor.policy_loss.clip_cov_lb": 6,
            },
            "policy_loss.clip_cov_lb=6.0 is not below clip_cov_ub=5.0",
        ),
        (
            {"actor_rollout_ref.rollout.n": 1, "algorithm.adv_estimator": "opo"},
            "actor_rollout_ref.rollout.n=1: opo compares responses of one prompt",
        ),
    ],
)
def test_losses_and_estimators_refuse_what_they_cannot_do(
    changes: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        load(minimal_settings(**changes))
