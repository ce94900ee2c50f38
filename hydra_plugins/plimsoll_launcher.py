"""Hydra's plugins: the launchers ``slurm`` and ``local``, and the sweeper ``grid`` that hands them
all jobs of a sweep. The work is done in :mod:`jobs`, imported when needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig

from jobs.submit.options import GridOptions, LocalOptions, SlurmOptions


class _PlimsollLauncher(Launcher):
    kind = ""

    def __init__(self, **settings: Any) -> None:
        self.settings = settings
        self.config: DictConfig | None = None
        self.context: HydraContext | None = None

    def setup(
        self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig
    ) -> None:
        """Hydra's first call. The task function is not used: a job runs the frozen config, not this
        process's code.
        """
        self.config = config
        self.context = hydra_context

    def launch(
        self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int
    ) -> Sequence[JobReturn]:
        """Hydra's second call: plan, check and start the jobs."""
        from jobs.hydra_entry import launch

        assert self.config is not None and self.context is not None
        return launch(
            self.kind, self.settings, self.config, self.context, job_overrides, initial_job_idx
        )


class SlurmLauncher(_PlimsollLauncher):
    """``hydra/launcher=slurm``: one Slurm array per resource shape."""

    kind = "slurm"


class LocalLauncher(_PlimsollLauncher):
    """``hydra/launcher=local``: the same payload as processes of this machine."""

    kind = "local"


class GridSweeper(BasicSweeper):
    """``hydra/sweeper=grid``: every combination of the values, as Hydra's own ``basic``, which
    composes each job once more and writes ``multirun.yaml`` before anything is checked.
    """

    def __init__(self, params: dict[str, str] | None = None) -> None:
        super().__init__(max_batch_size=None, params=params)

    def sweep(self, arguments: list[str]) -> Any:
        """Hand all jobs to the launcher at once."""
        assert self.launcher is not None and self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        overrides = parser.parse_overrides([*self._parse_config(), *arguments])
        jobs = [job for batch in self.split_arguments(overrides, None) for job in batch]
        return [self.launcher.launch(jobs, initial_job_idx=0)]


_store = ConfigStore.instance()
_store.store(group="hydra/launcher", name="slurm", node=SlurmOptions, provider="plimsoll")
_store.store(group="hydra/launcher", name="local", node=LocalOptions, provider="plimsoll")
_store.store(group="hydra/sweeper", name="grid", node=GridOptions, provider="plimsoll")
