"""A sweep's jobs are what Hydra composes for each of them, at a cost that allows a thousand."""

from __future__ import annotations

import cProfile
import io
import pstats
import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra._internal.callbacks import Callbacks
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import HydraContext
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from jobs.progress import Progress
from jobs.submit.compose import SweepComposer, compose_points
from jobs.submit.launch import jobs_of
from tests.config.helpers import python_m
from trainer.base.errors import UserError
from trainer.config.keys.conf_tree import conf_dir

COMMON = ["data=arithmetic", "model=tiny", "actor_rollout_ref.rollout.n=8", "cluster=dev"]
PARTS = [
    *["data=arithmetic", "data=gsm8k", "model=tiny", "parallel=dp1", "parallel=dp2"],
    *["algorithm=rloo", "rollout=hf", "cluster=generic", "container=apptainer", "container=none"],
    *["experiment=demo_sft", "experiment=gsm8k", "+data.extra=1"],
    *["++data.apply_chat_template_kwargs.a=1", "+data.apply_chat_template_kwargs.b=${data.seed}"],
    *["trainer.seed=3", "trainer.seed=4", "trainer.seed=null", "data.max_prompt_length=77"],
    *["actor_rollout_ref.actor.optim={lr:0.5}", "actor_rollout_ref.actor.optim.lr=1e-3"],
    *["actor_rollout_ref.actor.bucket_boundaries=[1,2]", "data.train_files=[a.jsonl,b.jsonl]"],
    *["trainer.experiment_name=x\\=y", "trainer.experiment_name='a, b: {}'"],
    *["trainer.experiment_name=${trainer.project_name}-x", "trainer.project_name=${data.seed}"],
    *["data.system_prompt='say \\'a\\' \\\\${b}'"],
    *["data.system_prompt='${trainer.seed}${data.seed}'"],
    *["trainer.experiment_name='run_${hydra:job.num}'", "data.seed=${oc.env:PLIMSOLL_NO_SUCH,7}"],
    *["data.prompt_key=${oc.env:HOME}", "data.answer_key=${no.such.key}", "data.shuffle=false"],
    *["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=[64,128]", "no.such.key=1", "~data.seed"],
    *["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=auto", "data.seed=${trainer.seed}"],
    *["trainer.seed=${data.seed}", "data.train_batch_size=1_000", "trainer=7", "data.task=???"],
    *["trainer.logger=${data.train_files}", "data.val_files=${data}", "data.response_key=''"],
]  # fmt: skip


@pytest.fixture
def hydra() -> Iterator[tuple[DictConfig, HydraContext]]:
    GlobalHydra.instance().clear()
    with initialize_config_dir(str(conf_dir()), version_base="1.3"):
        config = compose("config", COMMON, return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        HydraConfig.instance().set_config(config)
        yield config, HydraContext(config_loader=loader, callbacks=Callbacks())


def _by_hydra(config: DictConfig, context: HydraContext, overrides: list[str], index: int) -> Any:
    composed = context.config_loader.load_sweep_config(config, overrides)
    with open_dict(composed):
        composed.hydra.job.num = index
        HydraConfig.instance().set_config(composed)
        del composed["hydra"]
    return OmegaConf.to_container(composed, resolve=True)


def _outcome(make: Any) -> Any:
    """A value with its types, or the kind of the error."""
    try:
        return repr(make())
    except (HydraException, OmegaConfBaseException, RecursionError) as error:
        return type(error).__name__


@pytest.mark.parametrize(
    "sweeps", [40, pytest.param(1500, marks=pytest.mark.exhaustive)], ids=["short", "long"]
)
def test_every_job_is_what_hydra_composes(
    hydra: tuple[DictConfig, HydraContext], sweeps: int
) -> None:
    config, context = hydra
    composer = SweepComposer(config, context)
    draw = random.Random(5)
    for index in range(sweeps):
        chosen = draw.sample(PARTS, draw.randint(1, 6))
        overrides = [*COMMON, *chosen] if draw.random() < 0.7 else chosen
        ours = _outcome(partial(composer.compose, overrides, index))
        theirs = _outcome(partial(_by_hydra, config, context, overrides, index))
        assert ours == theirs, " ".join(overrides)


def test_jobs_that_cannot_be_composed_are_all_named(
    hydra: tuple[DictConfig, HydraContext],
) -> None:
    jobs = [["no.such.key=1"], ["trainer.seed=1"], ["data=nowhere"], ["data=nowhere"]]
    with pytest.raises(UserError) as error:
        compose_points(*hydra, jobs, 0, lambda done: None)
    assert "job 0 (no.such.key=1): Could not override 'no.such.key'" in str(error.value)
    assert "job 2 (data=nowhere)" in str(error.value)
    assert "2 problems" in str(error.value)


@pytest.mark.parametrize(
    ("given", "folders"),
    [
        ([], [None, None]),
        (["hydra.sweep.subdir=${hydra.job.num}"], ["3", "4"]),
        (["hydra.sweep.subdir=a-${trainer.seed}/x"], ["a-7/x", "a-8/x"]),
        (
            ["hydra.sweep.subdir=${hydra.job.override_dirname}"],
            ["trainer.seed=7", "trainer.seed=8"],
        ),
    ],
)
def test_subdir_is_what_hydra_makes_of_it(
    hydra: tuple[DictConfig, HydraContext], given: list[str], folders: list[str | None]
) -> None:
    _, context = hydra
    config = compose("config", [*COMMON, *given], return_hydra_config=True)
    points = compose_points(
        config, context, [["trainer.seed=7"], ["trainer.seed=8"]], 3, lambda done: None
    )
    shown = [point.subdir for point in points]
    assert shown == folders
    assert [point.config["trainer"]["seed"] for point in points] == [7, 8]


def _calls(hydra: tuple[DictConfig, HydraContext], count: int, folder: Path) -> tuple[int, int]:
    """Python calls, and compositions by Hydra, for ``count`` jobs up to their checked settings."""
    jobs = [[*COMMON, f"trainer.seed={n}", f"parallel=dp{1 + n % 2}"] for n in range(count)]
    profile = cProfile.Profile()
    profile.enable()
    points = compose_points(*hydra, jobs, 0, lambda done: None)
    assert len({job.signature for job in jobs_of(points, folder)}) == count
    profile.disable()
    stats: Any = pstats.Stats(profile, stream=io.StringIO())
    composed = sum(
        row[1] for (_, _, name), row in stats.stats.items() if name == "load_sweep_config"
    )
    return stats.total_calls, composed


def test_a_job_costs_some_thousand_calls(
    hydra: tuple[DictConfig, HydraContext], tmp_path: Path
) -> None:
    """Calls are counted, not time: the machine's load doesn't change them. A thousand take about
    0.5 ms, so 0.02 s are 40,000; one composition by Hydra alone is 250,000.
    """
    _calls(hydra, 4, tmp_path)  # imports and caches
    few, composed_few = _calls(hydra, 10, tmp_path)
    many, composed_many = _calls(hydra, 60, tmp_path)
    assert composed_few == composed_many == 2  # one for each choice of groups
    assert (many - few) / 50 < 20_000


@pytest.mark.parametrize("option", ["dry_run", "check"])
def test_nothing_is_left_behind(fake: Path, tmp_path: Path, option: str) -> None:
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    done = python_m(
        "trainer",
        "-m",
        *COMMON,
        "cluster.local_folders=[]",
        "trainer.seed=1,2",
        f"hydra.launcher.{option}=true",
        cwd=cwd,
    )
    assert done.returncode == 0, done.stderr
    assert "2 job(s) in 1 array(s)" in done.stdout
    assert list(cwd.iterdir()) == []


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_is_one_line_on_a_terminal_and_plain_lines_elsewhere(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for stream in (_Terminal(), io.StringIO()):
        times = iter(range(101))
        with Progress(
            "checked", 100, stream=stream, clock=lambda times=times: next(times) / 2
        ) as progress:
            for done in range(1, 101):
                progress(done)
        shown[type(stream)] = stream.getvalue()
    lines = shown[io.StringIO].splitlines()
    assert lines[0] == "checked 2 of 100 jobs, about 49 s left"
    assert len(lines) == 5  # 50 s, one line each 10 s
    assert "\n" not in shown[_Terminal]
    assert "\rchecked 99 of 100 jobs, about 0 s left" in shown[_Terminal]
    assert shown[_Terminal].endswith(
        "\r" + " " * len("checked 99 of 100 jobs, about 0 s left") + "\r"
    )
    assert "\x1b" not in shown[_Terminal]
