"""A vLLM engine in this process that is stepped from outside.

The engine ``vllm`` holds one; so does each server.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trainer.base.errors import UserError
from trainer.rollout.settings import KEY, Sampling
from trainer.rollout.vllm.engine import multi_token
from trainer.rollout.vllm.engine.requests import Request


@dataclass(frozen=True)
class RequestOutput:
    """Tokens of one request. ``finish_reason`` is None while the request has not ended."""

    request_id: str
    token_ids: list[int]
    log_probs: list[float]
    """Nats, one for each token."""
    finish_reason: str | None


class Core:
    """A vLLM engine. Only one thread may use it."""

    def __init__(self, arguments: dict[str, Any], executor_class: Any = None) -> None:
        """Build the engine with weights that mean nothing before ``load_weights``.

        ``arguments`` are those of ``vllm.EngineArgs``. ``executor_class`` replaces the executor
        class of vLLM that they name.

        Raises :class:`UserError` for a model or settings that vLLM refuses.
        """
        self._inside_trainer = torch.distributed.is_initialized()
        self._closed = False
        from vllm.engine.arg_utils import EngineArgs
        from vllm.usage.usage_lib import UsageContext
        from vllm.v1.engine.llm_engine import LLMEngine
        from vllm.v1.executor import Executor

        try:
            config = EngineArgs(**arguments).create_engine_config(UsageContext.ENGINE_CONTEXT)
            self._engine = LLMEngine(
                config, executor_class=executor_class or Executor.get_class(config), log_stats=False
            )
        except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
            raise UserError(
                f"{KEY}: vLLM refuses this model or these settings: {_first_line(error)} With "
                f"{KEY}.name=hf the trainer's own model generates"
            ) from error
        multi_token.patch_scheduler(self._engine.engine_core.engine_core.scheduler)
        self._engine.collective_rpc("plimsoll_prepare")

    @property
    def num_unfinished(self) -> int:
        """Number of requests that have not ended."""
        return int(self._engine.get_num_unfinished_requests())

    def add_request(self, request: Request, sampling: Sampling, eos_ids: Sequence[int]) -> None:
        """Begin ``request``, whose id differs from those of all unfinished ones."""
        self._engine.add_request(
            request.request_id,
            {"prompt_token_ids": request.prompt_ids},
            _sampling_params(request, sampling, eos_ids),
        )

    def step(self) -> list[RequestOutput]:
        """Draw the next tokens of as many requests as fit; return the requests that ended."""
        return [
            RequestOutput(
                o.request_id,
                list(o.outputs[0].token_ids),
                list(o.outputs[0].logprobs.logprobs),
                _finish_reason(o),
            )
            for o in self._engine.step()
        ]

    def abort_requests(self, request_ids: Iterable[str]) -> list[RequestOutput]:
        """End these requests, in the order in which they were begun.

        Returns the tokens that the unfinished ones among them have so far.
        """
        wanted = set(request_ids)
        outputs = [
            RequestOutput(
                state.external_req_id,
                list(state.detokenizer.output_token_ids),
                list(state.logprobs_processor.logprobs.logprobs),
                None,
            )
            for state in self._engine.output_processor.request_states.values()
            if state.external_req_id in wanted
        ]
        # One at a time: vLLM turns several into a set, whose order differs between processes.
        for output in outputs:
            self._engine.abort_request([output.request_id])
        return outputs

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> None:
        """Load the trainer's weights and drop cached prompts of older ones.

        Only while no request is unfinished.
        """
        self._engine.collective_rpc("plimsoll_load_weights", args=(weights,))
        self._reset_prefix_cache()

    def load_shared_weights(self, path: str, table: str) -> None:
        """Load weights as ``load_weights`` does, from memory that another process shares.

        ``path`` and ``table`` are those of
        :class:`trainer.rollout.vllm.engine.shared_weights.SharedWeights`.
        """
        self._engine.collective_rpc("plimsoll_load_shared_weights", args=(path, table))
        self._reset_prefix_cache()

    def sleep(self) -> None:
        """Move the weights to the host and free the key-value cache."""
        self._engine.sleep(level=1)

    def wake(self) -> None:
        """Undo ``sleep``."""
        self._engine.wake_up()

    def close(self) -> None:
        """Release all memory and processes. May be called twice.

        Inside the trainer vLLM's own shutdown would destroy the trainer's process groups as well.
        """
        if self._closed:
            return
        self._closed = True
        if not self._inside_trainer:
            self._engine.engine_core.shutdown()
            return
        from vllm.distributed import parallel_state

        # The finalizer would call vLLM's own shutdown when the engine is garbage-collected.
        self._engine.engine_core._finalizer.detach()
        inner = self._engine.engine_core.engine_core
        inner.structured_output_manager.clear_backend()
        inner.model_executor.shutdown()
        inner.scheduler.shutdown()
        parallel_state.destroy_model_parallel()
        world = parallel_state._WORLD
        parallel_state._WORLD = None
        if world is not None:
            world.destroy()

    def _reset_prefix_cache(self) -> None:
        if not self._engine.reset_prefix_cache():
            raise RuntimeError(
                "vLLM keeps cached prompts of older weights: a request is still unfinished"
            )


def _sampling_params(request: Request, sampling: Sampling, eos_ids: Sequence[int]) -> Any:
    """Return vLLM's parameters of ``request``.

    Temperature, top-k and top-p reach :mod:`trainer.rollout.vllm.engine.sampler` as extra
    arguments; vLLM's own sampler is not used.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from trainer.rollout.vllm.engine.sampler import extra_arguments

    return SamplingParams(
        temperature=0.0,
        max_tokens=request.max_tokens,
        stop_token_ids=list(eos_ids),
        ignore_eos=True,  # stop_token_ids holds all end tokens
        logprobs=0,  # of the drawn token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra_arguments(request, sampling),
        skip_clone=True,
    )


def _finish_reason(output: Any) -> str:
    return "stop" if output.outputs[0].finish_reason == "stop" else "length"


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    return text.rstrip(".") + "."
