"""The engine ``vllm``: vLLM in the trainer's process, on the trainer's device, with weights of its
own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from trainer.models import LoadedModel
from trainer.ranks.world import World
from trainer.rollout.protocol import Generation, Group
from trainer.rollout.settings import Sampling
from trainer.rollout.vllm.engine import isolation as surroundings
from trainer.rollout.vllm.engine.core import Core
from trainer.rollout.vllm.engine.model_folder import check_architecture, write_model_folder
from trainer.rollout.vllm.engine.options import Options
from trainer.rollout.vllm.engine.requests import Tally
from trainer.rollout.vllm.in_process.generation import Steps
from trainer.rollout.vllm.in_process.shards import Shards, executor


class VllmEngine:
    """One vLLM engine for one rank, or one shard of an engine that ``options.tensor_parallel_size``
    consecutive ranks have together: these call all methods together.
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
        """``folder``: private, for the engine's log and what it builds the model from."""
        self.loaded, self.options, self.eos_ids, self.folder = (
            loaded,
            options,
            list(eos_ids),
            folder,
        )
        self._world, self._shards = world, Shards()
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
        """Build the model with weights that mean nothing yet: ``update_weights`` comes before
        ``generate``.

        Raises :class:`UserError` for a model or a setting that vLLM refuses.
        """
        model = write_model_folder(self.loaded, self.folder / "model")
        with surroundings.guest(self.folder / "engine.log"):
            check_architecture(self.loaded)
            size = self.options.tensor_parallel_size
            self._shards = Shards.of(self._world, size)
            self._core = Core(self.options.arguments(str(model)), executor(self._world, size))

    def generate(self, groups: Sequence[Group], sampling: Sampling, *, seed: int) -> Generation:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        try:
            tally = Tally(
                groups,
                sampling,
                seed=seed,
                version=self.version,
                max_model_len=self.options.max_model_len,
            )
        except Exception:
            self._shards.share(None)  # the others need not wait
            raise
        rows, stats = self.options.max_num_seqs, self._stats
        return Steps(self.core, self._shards, tally, sampling, self.eos_ids, rows=rows, stats=stats)

    def update_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """See :class:`trainer.rollout.protocol.RolloutEngine`."""
        self.core.load(weights)
        self.version = version

    def sleep(self) -> None:
        """Weights to the host and the cache away, on a GPU; on a CPU vLLM has nothing to give
        back.
        """
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
            self._shards.close()
