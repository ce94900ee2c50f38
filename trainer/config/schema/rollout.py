"""``actor_rollout_ref.rollout.*``: generation."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from trainer.config.schema.actor import BY_TOKENS, Actor, Model, Ref
from trainer.config.schema.base import (
    HIGHEST_TEMPERATURE,
    LOWEST_TEMPERATURE,
    Budget,
    Count,
    Interval,
    OpenShare,
    Positive,
    Section,
    Text,
    Whole,
)
from trainer.config.schema.markers import (
    MAY_CHANGE,
    READ_BY_SERVER,
    READ_BY_VLLM,
    RL_ONLY,
    USER_CODE,
    NoEffect,
)

Temperature = Annotated[float, Field(ge=LOWEST_TEMPERATURE, le=HIGHEST_TEMPERATURE)]


GREEDY_VALIDATION = NoEffect(
    "actor_rollout_ref.rollout.val_kwargs.do_sample",
    (False,),
    "takes the likeliest token: set it to true",
)
LOG_PROBS_BY_TOKENS = replace(
    BY_TOKENS, switch="actor_rollout_ref.rollout.log_prob_use_dynamic_bsz"
)
NO_SERVER = NoEffect(
    "actor_rollout_ref.rollout.name", ("hf", "vllm"), "starts no server: set it to vllm_server"
)
ONE_TURN = NoEffect(
    "actor_rollout_ref.rollout.agent.name",
    (None,),
    "is one turn without tools: set it to calculator, or to a class of yours",
    refused=True,
    and_also={"actor_rollout_ref.rollout.agent.path": None},
)


class ValKwargs(Section):
    """``actor_rollout_ref.rollout.val_kwargs``: sampling in validation."""

    n: Count
    """Responses of a prompt."""
    do_sample: bool
    """Draw tokens. false: take the likeliest."""
    temperature: Annotated[
        Annotated[float, Field(ge=0, le=HIGHEST_TEMPERATURE)], GREEDY_VALIDATION.allowing(0.0)
    ]
    """Divides the logits. 0: take the likeliest token."""
    top_p: Annotated[OpenShare, GREEDY_VALIDATION]
    """Draw from the smallest set of tokens that holds this probability."""
    top_k: Annotated[Interval, GREEDY_VALIDATION]
    """Draw from so many likeliest tokens. -1: all."""


class Server(Section):
    """``actor_rollout_ref.rollout.server``: engines in processes of their own (vllm_server)."""

    replicas: Count
    """Servers started on each node that holds any; prompts are dealt out over them."""
    start_timeout_s: Annotated[Positive, NO_SERVER]
    """Longest wait for a server to be ready."""


class Agent(Section):
    """``actor_rollout_ref.rollout.agent``: responses of several turns."""

    name: Text | None
    """``calculator``, or the name of a class in ``path``. null: one turn, no tools."""
    path: Annotated[Text | None, USER_CODE]
    """Python file that holds the class ``name``; the run keeps a copy, as of a reward's file."""
    max_turns: Annotated[Count, ONE_TURN]
    """Most turns that the model speaks in one response."""
    turn_timeout_s: Annotated[Positive, ONE_TURN]
    """Longest time of one tool call; after it the model is told so."""
    max_observation_length: Annotated[Count, ONE_TURN]
    """Most tokens of what a tool answers; the rest is cut."""


class Rollout(Section):
    """``actor_rollout_ref.rollout``."""

    name: Literal["hf", "vllm", "vllm_server"]
    """Generation engine: transformers; vLLM in the trainer's process; vLLM in processes of its own,
    over HTTP.
    """
    n: Count
    """Responses of a prompt: the group of GRPO."""
    temperature: Temperature
    """Divides the logits, in generation and in every log-prob."""
    top_p: OpenShare
    """Draw from the smallest set of tokens that holds this probability."""
    top_k: Interval
    """Draw from so many likeliest tokens. -1: all."""
    do_sample: bool
    """Draw tokens. false: take the likeliest."""
    prompt_length: Count
    """Longest prompt, tokens. Follows ``data.max_prompt_length``."""
    response_length: Count
    """Longest response, tokens. Follows ``data.max_response_length``."""
    max_num_seqs: Annotated[Count, MAY_CHANGE]
    """Sequences that an engine generates at once; a finished one makes room for the next."""
    calculate_log_probs: bool
    """Keep the log-probs under which tokens were drawn."""
    log_prob_use_dynamic_bsz: bool
    """Cut the micro-batches that recompute old log-probs by tokens."""
    log_prob_max_token_len_per_gpu: Annotated[Budget, MAY_CHANGE]
    """Most tokens of such a forward-only micro-batch of a rank."""
    log_prob_micro_batch_size_per_gpu: Annotated[Count | None, LOG_PROBS_BY_TOKENS]
    """Sequences of such a micro-batch when ``log_prob_use_dynamic_bsz`` is false."""
    gpu_memory_utilization: Annotated[OpenShare, MAY_CHANGE, READ_BY_VLLM]
    """Share of the GPU's memory for generation (vllm)."""
    max_num_batched_tokens: Annotated[Budget, MAY_CHANGE]
    """Tokens of one engine step (vllm). Follows the actor's budget."""
    tensor_model_parallel_size: Annotated[Count, READ_BY_VLLM]
    """GPUs that share one generation engine (vllm)."""
    enable_chunked_prefill: Annotated[bool, READ_BY_VLLM]
    """Cut long prompts into chunks (vllm)."""
    streaming: Annotated[bool, MAY_CHANGE]
    """Score responses and run the reference on them while others are still generated. false: one
    phase after the other.
    """
    over_sampling: Annotated[float, Field(ge=1, le=1000), RL_ONLY]
    """Begin so many times the prompts that a step needs and stop when enough are finished."""
    one_step_off: Annotated[bool, READ_BY_SERVER, RL_ONLY]
    """Generate the next step's responses while this one's are trained on (vllm_server)."""
    timeout_s: Annotated[Positive, MAY_CHANGE, READ_BY_SERVER]
    """A server without a new token for so long counts as hung and is restarted (vllm_server)."""
    max_restarts: Annotated[Whole, MAY_CHANGE, READ_BY_SERVER]
    """Restarts of a server since the last weights before the run saves and ends (vllm_server)."""
    nnodes: Annotated[Whole, MAY_CHANGE, READ_BY_SERVER]
    """Nodes of a Slurm job beside ``trainer.nnodes`` that only hold servers (vllm_server). 0: no
    such nodes.
    """
    server: Annotated[Server, MAY_CHANGE]
    agent: Agent
    val_kwargs: Annotated[ValKwargs, MAY_CHANGE]


class ActorRolloutRef(Section):
    """``actor_rollout_ref``."""

    hybrid_engine: bool
    """Actor, rollout and reference live in one process per GPU. Only true is supported."""
    model: Model
    actor: Actor
    ref: Ref
    rollout: Rollout
