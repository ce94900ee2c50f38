"""A vLLM engine in this process, taken step by step. The engine ``vllm`` is one; a server holds
one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.rollout.settings import KEY, Sampling
from trainer.rollout.vllm.engine import multi_token as ahead
from trainer.rollout.vllm.engine.requests import Request


@dataclass(frozen=True)
class Drawn:
    """Tokens of a request; ``reason`` is None where it has not ended."""

    key: str
    token_ids: list[int]
    log_probs: list[float]
    reason: str | None


class Core:
    """Raises :class:`UserError` when made from a model or settings that vLLM refuses. Belongs to
    one thread.
    """

    def __init__(self, arguments: dict[str, Any], executor: Any = None) -> None:
        """``arguments``: as ``vllm.EngineArgs``; ``executor``: a class of vLLM's, in place of the
        one that they name. The weights mean nothing before ``load``.
        """
        self._guest, self._closed = torch.distributed.is_initialized(), False
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        try:
            config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            self._engine = LLMEngine(
                config, executor_class=executor or Executor.get_class(config), log_stats=False
            )
        except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
            raise UserError(
                f"{KEY}: vLLM refuses this model or these settings: {_said(error)} With "
                f"{KEY}.name=hf the trainer's "
                "own model generates"
            ) from error
        ahead.reserve(self._engine.engine_core.engine_core.scheduler)
        self._engine.collective_rpc("plimsoll_prepare")

    @property
    def open(self) -> int:
        """Requests under way."""
        return int(self._engine.get_num_unfinished_requests())

    def add(self, request: Request, sampling: Sampling, eos_ids: Sequence[int]) -> None:
        """Begin ``request``, whose key no other one under way has."""
        self._engine.add_request(
            request.key,
            {"prompt_token_ids": request.prompt_ids},
            _parameters(request, sampling, eos_ids),
        )

    def step(self) -> list[Drawn]:
        """One token for as many as fit; those that ended by it."""
        return [
            Drawn(
                o.request_id,
                list(o.outputs[0].token_ids),
                list(o.outputs[0].logprobs.logprobs),
                _reason(o),
            )
            for o in self._engine.step()
        ]

    def abort(self, keys: Iterable[str]) -> list[Drawn]:
        """End these requests, in the order in which they were begun; what came of those that had
        not ended.
        """
        wanted = set(keys)
        drawn = [
            Drawn(
                state.external_req_id,
                list(state.detokenizer.output_token_ids),
                list(state.logprobs_processor.logprobs.logprobs),
                None,
            )
            for state in self._engine.output_processor.request_states.values()
            if state.external_req_id in wanted
        ]
        for (
            one
        ) in drawn:  # of several vLLM makes a set, whose order differs from one process to the next
            self._engine.abort_request([one.key])
        return drawn

    def load(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """The trainer's weights, and no cache of older ones. Only while nothing is under way."""
        self._engine.collective_rpc("plimsoll_load", args=(weights,))
        self._forget()

    def load_shared(self, path: str, table: str) -> None:
        """The same from memory that another process shares
        (``trainer.rollout.vllm.server.shared_weights``).
        """
        self._engine.collective_rpc("plimsoll_load_shared", args=(path, table))
        self._forget()

    def sleep(self) -> None:
        """Weights to the host and the cache away."""
        self._engine.sleep(level=1)

    def wake(self) -> None:
        """Take both again."""
        self._engine.wake_up()

    def close(self) -> None:
        """Give everything back; twice is fine. vLLM's own way would take the trainer's process
        groups down with its own.
        """
        if self._closed:
            return
        self._closed = True
        if not self._guest:
            self._engine.engine_core.shutdown()
            return
        from vllm.distributed import parallel_state

        # it would do the same as soon as nobody knows the engine
        self._engine.engine_core._finalizer.detach()
        inner = self._engine.engine_core.engine_core
        inner.structured_output_manager.clear_backend()
        inner.model_executor.shutdown()
        inner.scheduler.shutdown()
        parallel_state.destroy_model_parallel()
        world, parallel_state._WORLD = parallel_state._WORLD, None
        if world is not None:
            world.destroy()

    def _forget(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM keeps cached prompts of older weights: a request is still under way"
            )


def _parameters(request: Request, sampling: Sampling, eos_ids: Sequence[int]) -> Any:
    """What vLLM itself has to know; how to draw it passes on (see
    ``trainer.rollout.vllm.engine.sampler``).
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from trainer.rollout.vllm.engine.sampler import extra_arguments

    return SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens,
        stop_token_ids=list(eos_ids),
        ignore_eos=True,  # the ones above are all
        logprobs=0,  # of the drawn token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra_arguments(request, sampling),
        skip_clone=True,
    )


def _reason(output: Any) -> str:
    return "stop" if output.outputs[0].finish_reason == "stop" else "length"


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."
