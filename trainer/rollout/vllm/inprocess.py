"""The engine ``vllm``: vLLM in the trainer's process, on the trainer's device, with weights of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from trainer.errors import UserError
from trainer.models import LoadedModel
from trainer.rollout.protocol import Finished, FinishReason, Generation, Group
from trainer.rollout.settings import KEY, Sampling
from trainer.rollout.vllm import surroundings
from trainer.rollout.vllm.folder import check_architecture, write_model_folder
from trainer.rollout.vllm.options import Options
from trainer.rollout.vllm.tally import Request, Tally


class VllmEngine:
    """One vLLM engine for one rank. ``folder``: private, for its log and what it builds the model from."""

    shares_weights = False

    def __init__(self, loaded: LoadedModel, options: Options, *, eos_ids: Sequence[int], folder: Path) -> None:
        self.loaded, self.options, self.eos_ids, self.folder = loaded, options, list(eos_ids), folder
        self.version = 0
        self._engine: Any = None
        self._scale = 0.0
        self._stats: dict[str, float] = {}

    def start(self) -> None:
        """Build the model with weights that mean nothing yet: ``update_weights`` comes before ``generate``.

        Raises :class:`UserError` for a model or a setting that vLLM refuses.
        """
        log = self.folder / "engine.log"
        model = write_model_folder(self.loaded, self.folder / "model")
        with surroundings.guest(log, surroundings.in_process()):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.v1.engine.llm_engine import LLMEngine

            check_architecture(self.loaded)
            arguments = self.options.arguments(str(model)) | {"distributed_executor_backend": "uni"}
            try:
                self._engine = LLMEngine.from_engine_args(EngineArgs(**arguments))
            except (ValueError, NotImplementedError, AssertionError, RuntimeError) as error:
                raise UserError(
                    f"{KEY}.name=vllm: vLLM refuses this model or these settings: {_said(error)} Its log is {log}; "
                    f"{KEY}.name=hf generates with the trainer's own model"
                ) from error

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        tally = Tally(groups, sampling, seed=seed, version=self.version, max_model_len=self.options.max_model_len)
        if self._scale != sampling.scale:
            self._engine.collective_rpc("plimsoll_scale", args=(sampling.scale,))
            self._scale = sampling.scale
        return _Drawing(self._engine, tally, sampling, self.eos_ids, self.options.max_num_seqs, self._stats)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        self._engine.collective_rpc("plimsoll_load", args=(weights,))
        self._engine.reset_prefix_cache()
        self.version = version

    def sleep(self) -> None:
        """Weights to the host and the cache away, on a GPU; on a CPU vLLM has nothing to give back."""
        if not self.options.on_cpu:
            self._engine.sleep(level=1)

    def wake(self) -> None:
        """Take both again."""
        if not self.options.on_cpu:
            self._engine.wake_up()

    def stats(self) -> Mapping[str, float]:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        return dict(self._stats)

    def close(self) -> None:
        """Give the cache and the weights back."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()


class _Drawing:
    """A generation under way: vLLM takes a step when somebody asks for the next group."""

    def __init__(
        self, engine: Any, tally: Tally, sampling: Sampling, eos_ids: list[int], rows: int, stats: dict[str, float]
    ) -> None:
        self._engine, self._tally, self._rows, self._stats = engine, tally, rows, stats
        self._steps = self._busy = 0
        stats.clear()
        for request in tally.open:
            engine.add_request(
                request.key, {"prompt_token_ids": request.prompt_ids}, _parameters(request, sampling, eos_ids)
            )

    def __iter__(self) -> Iterator[Finished]:
        yield from self._tally.take()
        try:
            while self._tally.open:
                self._step()
                yield from self._tally.take()
        except FloatingPointError:
            self._abort()
            raise
        finally:
            self._count()

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        for state in list(self._engine.output_processor.request_states.values()):
            self._tally.add(state.external_req_id, state.detokenizer.output_token_ids, _flat(state.logprobs_processor))
        self._abort()
        left = self._tally.stop()
        self._count()
        return left

    def _step(self) -> None:
        self._busy += min(self._rows, self._engine.get_num_unfinished_requests())
        self._steps += 1
        for output in self._engine.step():
            drawn = output.outputs[0]
            self._tally.add(output.request_id, drawn.token_ids, drawn.logprobs.logprobs)
            self._tally.end(output.request_id, _reason(drawn.finish_reason))

    def _abort(self) -> None:
        self._engine.abort_request([request.key for request in self._tally.open])

    def _count(self) -> None:
        self._stats.update(
            tokens=float(self._tally.tokens),
            prompt_tokens=float(self._tally.prompt_tokens),
            steps=float(self._steps),
            busy_rows=self._busy / max(1, self._steps * self._rows),
            restarts=0.0,
        )


def _parameters(request: Request, sampling: Sampling, eos_ids: list[int]) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(
        temperature=0.0 if sampling.greedy else sampling.temperature,
        top_p=1.0 if sampling.greedy else sampling.top_p,
        top_k=0 if sampling.greedy else max(0, sampling.top_k),
        seed=request.seed,
        max_tokens=request.max_tokens,
        stop_token_ids=eos_ids,
        ignore_eos=True,  # the ones above are all
        logprobs=0,  # of the drawn token only
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )


def _flat(processor: Any) -> list[float]:
    found: list[float] = processor.logprobs.logprobs
    return found


def _reason(said: str | None) -> FinishReason:
    return "stop" if said == "stop" else "length"


def _said(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__).rstrip(".") + "."
