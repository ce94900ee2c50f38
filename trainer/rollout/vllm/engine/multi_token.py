"""Several tokens for each turn of vLLM's scheduler.

Between two tokens vLLM schedules, keeps books and hands out in Python, which for a small model, and
for many responses, takes as long as the model. Nothing of that depends on the tokens as long as no
request comes or goes: so the worker draws some tokens in a row, and the scheduler hears of all of
them at once, as it does of accepted drafts. A response that ends in the middle is cut there by the
scheduler; what its row drew behind its end is thrown away.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

TOKENS = 4
"""In a row. A response that ends throws (TOKENS - 1) / 2 tokens away, on average."""


def reserve(scheduler: Any) -> None:
    """Let vLLM's ``scheduler`` keep places for the tokens ahead, and count them once they have
    come.
    """
    scheduler.num_lookahead_tokens = TOKENS - 1
    update = scheduler.update_from_output

    def update_from_output(scheduled: Any, drawn: Any) -> Any:
        outputs = update(scheduled, drawn)
        for key, row in drawn.req_id_to_index.items():
            request = scheduler.requests.get(key)
            if request is not None and (ahead := len(drawn.sampled_token_ids[row]) - 1) > 0:
                request.num_computed_tokens += ahead
        return outputs

    scheduler.update_from_output = update_from_output


def install(runner: Any) -> None:
    """Let vLLM's model ``runner`` draw up to ``TOKENS`` tokens for every one that it is asked
    for.
    """
    sample = runner.sample_tokens

    def sample_tokens(grammar: Any) -> Any:
        scheduled = (
            None
            if runner.execute_model_state is None
            else runner.execute_model_state.scheduler_output
        )
        drawn = [sample(grammar)]
        if scheduled is None or not all(
            drawn[0].sampled_token_ids
        ):  # a row is not through its prompt
            return drawn[0]
        again = _same_rows(scheduled)
        rows = runner.input_batch.num_reqs
        for _ in range(_places(runner)):
            if _all_ended(runner):
                break
            runner.input_batch.num_computed_tokens_cpu[:rows] = (
                runner.input_batch.num_tokens_no_spec[:rows] - 1
            )
            runner.execute_model(again)
            drawn.append(sample(None))
        return drawn[0] if len(drawn) == 1 else _joined(drawn)

    runner.sample_tokens = sample_tokens


def _same_rows(scheduled: Any) -> Any:
    """A turn that takes one token of each row of ``scheduled`` and changes nothing else."""
    keys = scheduled.num_scheduled_tokens
    return replace(
        type(scheduled).make_empty(),
        num_scheduled_tokens=dict.fromkeys(keys, 1),
        total_num_scheduled_tokens=len(keys),
    )


def _places(runner: Any) -> int:
    """Tokens that every row has a place for."""
    batch = runner.input_batch
    longest = int(batch.num_tokens_no_spec[: batch.num_reqs].max())
    return min(TOKENS - 1, int(runner.max_model_len) - longest)


def _all_ended(runner: Any) -> bool:
    for key in runner.input_batch.req_ids:
        state = runner.requests[key]
        wanted, drawn = state.sampling_params, state.output_token_ids
        if len(drawn) < wanted.max_tokens and drawn[-1] not in wanted.all_stop_token_ids:
            return False
    return True


def _joined(drawn: list[Any]) -> Any:
    """One answer that has each row's tokens in a row."""
    first, count = drawn[0], len(drawn)
    tokens = [
        [token for one in row for token in one]
        for row in zip(*(d.sampled_token_ids for d in drawn), strict=True)
    ]
    parts = [np.stack(part, axis=1) for part in zip(*(d.logprobs[:3] for d in drawn), strict=True)]
    flat = [part.reshape(-1, *part.shape[2:]) for part in parts]
    cuts = list(range(0, len(tokens) * count + 1, count))
    return replace(first, sampled_token_ids=tokens, logprobs=type(first.logprobs)(*flat, cuts))
