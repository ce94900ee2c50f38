"""``actor_rollout_ref.rollout.*``: generation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema.actor import Actor, Model, Ref
from trainer.config.schema.base import Budget, Count, NonNegative, OpenShare, Positive, Section

TopK = Annotated[int, Field(ge=-1)]


class ValKwargs(Section):
    """``actor_rollout_ref.rollout.val_kwargs``: sampling in validation."""

    n: Count
    """Responses of a prompt."""
    do_sample: bool
    """Draw tokens. false: take the likeliest."""
    temperature: NonNegative
    """Divides the logits. 0: take the likeliest token."""
    top_p: OpenShare
    """Draw from the smallest set of tokens that holds this probability."""
    top_k: TopK
    """Draw from so many likeliest tokens. -1: all."""


class Rollout(Section):
    """``actor_rollout_ref.rollout``."""

    name: Literal["hf", "vllm"]
    """Generation engine."""
    n: Count
    """Responses of a prompt: the group of GRPO."""
    temperature: Positive
    """Divides the logits, in generation and in every log-prob."""
    top_p: OpenShare
    """Draw from the smallest set of tokens that holds this probability."""
    top_k: TopK
    """Draw from so many likeliest tokens. -1: all."""
    do_sample: bool
    """Draw tokens. false: take the likeliest."""
    prompt_length: Count
    """Longest prompt, tokens. Follows ``data.max_prompt_length``."""
    response_length: Count
    """Longest response, tokens. Follows ``data.max_response_length``."""
    batch_size: Count | None
    """Sequences that a rank generates at once (hf). null: all."""
    calculate_log_probs: bool
    """Keep the log-probs under which tokens were drawn."""
    log_prob_use_dynamic_bsz: bool
    """Cut the micro-batches that recompute old log-probs by tokens."""
    log_prob_max_token_len_per_gpu: Budget
    """Most tokens of such a forward-only micro-batch of a rank."""
    log_prob_micro_batch_size_per_gpu: Count | None
    """Sequences of such a micro-batch when ``log_prob_use_dynamic_bsz`` is false."""
    gpu_memory_utilization: OpenShare
    """Share of the GPU's memory for generation (vllm)."""
    max_num_batched_tokens: Budget
    """Tokens of one engine step (vllm). Follows the actor's budget."""
    tensor_model_parallel_size: Count
    """GPUs that share one generation engine (vllm)."""
    enable_chunked_prefill: bool
    """Cut long prompts into chunks (vllm)."""
    val_kwargs: ValKwargs


class ActorRolloutRef(Section):
    """``actor_rollout_ref``."""

    hybrid_engine: bool
    """Actor, rollout and reference live in one process per GPU. Only true is supported."""
    model: Model
    actor: Actor
    ref: Ref
    rollout: Rollout
