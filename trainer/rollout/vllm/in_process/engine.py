"""The engine ``vllm``: vLLM in the trainer's process, with its own weights on the same device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.protocol import Generation, Group
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine.core import Core
from trainer.rollout.vllm.engine.isolation import isolated_vllm
from trainer.rollout.vllm.engine.model_folder import check_architecture, write_model_folder
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.requests import RequestTracker
from trainer.rollout.vllm.in_process.generation import InProcessGeneration
from trainer.rollout.vllm.in_process.shards import Shards, executor_class


class VllmEngine:
    """One vLLM engine for one rank, or one shard of an engine.

    ``options.tensor_parallel_size`` consecutive ranks share an engine; these call all methods
    together. The methods are those of :class:`trainer.rollout.protocol.RolloutEngine`.
    """

    shares_weights = False

    def __init__(
        self,
        loaded: LoadedModel,
        options: Options,
        world: World,
        *,
        eos_ids: Sequence[int],
        folder: Path,
    ) -> None:
        """``folder`` is private to this rank: the engine's log, and the model folder for vLLM."""
        self.loaded = loaded
        self.options = options
        self.eos_ids = list(eos_ids)
        self.folder = folder
        self.version = 0
        self._world = world
        self._shards = Shards()
        self._core: Core | None = None
        self._stats: dict[str, float] = {}

    @property
    def core(self) -> Core:
        """The started engine. Raises RuntimeError before ``start``."""
        if self._core is None:
            raise RuntimeError("the vllm engine has not been started")
        return self._core

    def start(self) -> None:
        """Build the model. Its weights mean nothing before ``update_weights``.

        Raises :class:`UserError` for a model or a setting that vLLM refuses.
        """
        model = write_model_folder(self.loaded, self.folder / "model")
        with isolated_vllm(self.folder / "engine.log"):
            check_architecture(self.loaded)
            size = self.options.tensor_parallel_size
            self._shards = Shards.create(self._world, size)
            arguments = self.options.engine_args(str(model))
            self._core = Core(arguments, executor_class(self._world, size))

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """Begin to generate; the ranks of one engine may have different groups.

        Raises :class:`UserError` for an empty prompt, or one that leaves no room for its response.
        """
        try:
            tracker = RequestTracker(
                groups,
                sampling,
                seed=seed,
                version=self.version,
                max_model_len=self.options.max_model_len,
            )
        except Exception:
            self._shards.gather_tensors(None)  # ends the other ranks' wait for this one's requests
            raise
        return InProcessGeneration(
            self.core,
            self._shards,
            tracker,
            sampling,
            self.eos_ids,
            max_num_seqs=self.options.max_num_seqs,
            stats=self._stats,
        )

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Load ``weights`` and drop cached prompts of older ones."""
        self.core.load_weights(weights)
        self.version = version

    def sleep(self) -> None:
        """On a GPU move the weights to the host and free the cache; on a CPU do nothing."""
        if not self.options.on_cpu:
            self.core.sleep()

    def wake(self) -> None:
        """Undo ``sleep``."""
        if not self.options.on_cpu:
            self.core.wake()

    def stats(self) -> Mapping[str, float]:
        """Return the counters of the last generation."""
        return dict(self._stats)

    def close(self) -> None:
        """Free the cache and the weights."""
        core = self._core
        self._core = None
        if core is not None:
            core.close()
            self._shards.close()
