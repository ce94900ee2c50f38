"""The engine ``vllm``: vLLM in the trainer's process, on the trainer's device, with weights of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.models import LoadedModel
from trainer.rollout.protocol import EngineFailed, Finished, Generation, Group
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm import surroundings
from trainer.rollout.vllm.core import Core
from trainer.rollout.vllm.folder import check_architecture, write_model_folder
from trainer.rollout.vllm.options import Options
from trainer.rollout.vllm.tally import Tally


class VllmEngine:
    """One vLLM engine for one rank. ``folder``: private, for its log and what it builds the model from."""

    shares_weights = False

    def __init__(self, loaded: LoadedModel, options: Options, *, eos_ids: Sequence[int], folder: Path) -> None:
        self.loaded, self.options, self.eos_ids, self.folder = loaded, options, list(eos_ids), folder
        self.version = 0
        self._core: Core | None = None
        self._stats: dict[str, float] = {}

    @property
    def core(self) -> Core:
        """The engine itself, once started."""
        if self._core is None:
            raise RuntimeError("the vllm engine has not been started")
        return self._core

    def start(self) -> None:
        """Build the model with weights that mean nothing yet: ``update_weights`` comes before ``generate``.

        Raises :class:`UserError` for a model or a setting that vLLM refuses.
        """
        model = write_model_folder(self.loaded, self.folder / "model")
        with surroundings.guest(self.folder / "engine.log"):
            check_architecture(self.loaded)
            self._core = Core(self.options.arguments(str(model)))

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        tally = Tally(groups, sampling, seed=seed, version=self.version, max_model_len=self.options.max_model_len)
        return _Steps(self.core, tally, sampling, self.eos_ids, self.options.max_num_seqs, self._stats)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        self.core.load(weights)
        self.version = version

    def sleep(self) -> None:
        """Weights to the host and the cache away, on a GPU; on a CPU vLLM has nothing to give back."""
        if not self.options.on_cpu:
            self.core.sleep()

    def wake(self) -> None:
        """Take both again."""
        if not self.options.on_cpu:
            self.core.wake()

    def stats(self) -> Mapping[str, float]:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        return dict(self._stats)

    def close(self) -> None:
        """Give the cache and the weights back."""
        core, self._core = self._core, None
        if core is not None:
            core.close()


class _Steps:
    """A generation under way: vLLM takes a step when somebody asks for the next group."""

    def __init__(
        self, core: Core, tally: Tally, sampling: Sampling, eos_ids: list[int], rows: int, stats: dict[str, float]
    ) -> None:
        self._core, self._tally, self._rows, self._stats = core, tally, rows, stats
        self._steps = self._busy = 0
        stats.clear()
        for request in tally.open:
            core.add(request, sampling, eos_ids)

    def __iter__(self) -> Iterator[Finished]:
        try:
            yield from self._tally.take()
            while self._tally.open:
                self._step()
                yield from self._tally.take()
        except FloatingPointError:
            self._core.abort(request.key for request in self._tally.open)
            raise
        finally:
            self._count()

    def stop(self) -> list[Finished]:
        """See :class:`trainer.rollout.protocol.Generation`."""
        for drawn in self._core.abort(request.key for request in self._tally.open):
            self._tally.add(drawn.key, drawn.token_ids, drawn.log_probs)
        left = self._tally.stop()
        self._count()
        return left

    def _step(self) -> None:
        self._busy += min(self._rows, self._core.open)
        self._steps += 1
        try:
            ended = self._core.step()
        except Exception as error:
            raise EngineFailed(f"vLLM failed while it generated: {type(error).__name__}: {error}") from error
        for drawn in ended:
            self._tally.add(drawn.key, drawn.token_ids, drawn.log_probs)
            self._tally.end(drawn.key, drawn.reason)

    def _count(self) -> None:
        self._stats.update(self._tally.stats(), steps=float(self._steps), restarts=0.0)
        self._stats["busy_rows"] = self._busy / max(1, self._steps * self._rows)
