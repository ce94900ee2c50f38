"""Several tokens for each step of vLLM's scheduler.

Between two tokens vLLM schedules, updates its request states and builds outputs in Python, which
takes as long as the model for a small model or for many responses. None of that depends on the
tokens as long as no request begins or ends. So the worker draws several tokens in a row, and the
scheduler is given all of them at once, as it is given the accepted tokens of speculative decoding.
A response that ends among them is cut there by the scheduler; what was drawn behind its end is
discarded.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

TOKENS_PER_STEP = 4
"""A response discards (TOKENS_PER_STEP - 1) / 2 tokens behind its end, on average."""


def patch_scheduler(scheduler: Any) -> None:
    """Let vLLM's ``scheduler`` reserve cache for the additional tokens, and count those drawn."""
    scheduler.num_lookahead_tokens = TOKENS_PER_STEP - 1
    original = scheduler.update_from_output

    def update_from_output(scheduled: Any, runner_output: Any) -> Any:
        outputs = original(scheduled, runner_output)
        for request_id, row in runner_output.req_id_to_index.items():
            request = scheduler.requests.get(request_id)
            additional = len(runner_output.sampled_token_ids[row]) - 1
            if request is not None and additional > 0:
                request.num_computed_tokens += additional
        return outputs

    scheduler.update_from_output = update_from_output


def patch_model_runner(runner: Any) -> None:
    """Let vLLM's model ``runner`` draw up to ``TOKENS_PER_STEP`` tokens for each one requested."""
    original = runner.sample_tokens

    def sample_tokens(grammar: Any) -> Any:
        state = runner.execute_model_state
        scheduled = None if state is None else state.scheduler_output
        outputs = [original(grammar)]
        # A row without a token is still in its prefill.
        if scheduled is None or not all(outputs[0].sampled_token_ids):
            return outputs[0]
        next_step = _one_token_each(scheduled)
        batch = runner.input_batch
        rows = batch.num_reqs
        for _ in range(_free_positions(runner)):
            if _all_ended(runner):
                break
            batch.num_computed_tokens_cpu[:rows] = batch.num_tokens_no_spec[:rows] - 1
            runner.execute_model(next_step)
            outputs.append(original(None))
        return outputs[0] if len(outputs) == 1 else _concatenate(outputs)

    runner.sample_tokens = sample_tokens


def _one_token_each(scheduled: Any) -> Any:
    """Return a scheduler output that takes one token of each row of ``scheduled``, no more."""
    request_ids = scheduled.num_scheduled_tokens
    return replace(
        type(scheduled).make_empty(),
        num_scheduled_tokens=dict.fromkeys(request_ids, 1),
        total_num_scheduled_tokens=len(request_ids),
    )


def _free_positions(runner: Any) -> int:
    """Return how many more tokens every row of the batch has positions for."""
    batch = runner.input_batch
    longest = int(batch.num_tokens_no_spec[: batch.num_reqs].max())
    return min(TOKENS_PER_STEP - 1, int(runner.max_model_len) - longest)


def _all_ended(runner: Any) -> bool:
    for request_id in runner.input_batch.req_ids:
        state = runner.requests[request_id]
        params = state.sampling_params
        drawn = state.output_token_ids
        if len(drawn) < params.max_tokens and drawn[-1] not in params.all_stop_token_ids:
            return False
    return True


def _concatenate(outputs: list[Any]) -> Any:
    """Return one model runner output that holds each row's tokens of all ``outputs``."""
    first = outputs[0]
    count = len(outputs)
    tokens = []
    for row in zip(*(output.sampled_token_ids for output in outputs), strict=True):
        tokens.append([token for ids in row for token in ids])
    log_probs = []
    for arrays in zip(*(output.logprobs[:3] for output in outputs), strict=True):
        stacked = np.stack(arrays, axis=1)
        log_probs.append(stacked.reshape(-1, *stacked.shape[2:]))
    offsets = list(range(0, len(tokens) * count + 1, count))
    return replace(
        first, sampled_token_ids=tokens, logprobs=type(first.logprobs)(*log_probs, offsets)
    )
