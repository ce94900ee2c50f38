"""A stop is heard wherever a run waits, costs no step, and leaves no trace in what is learnt."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.e2e import hanging_reward, slow_import_reward
from tests.e2e.runs import GRPO, MAX_RUN_S, assert_same, finish, kill, metrics, start, wait_for_exit

STEPS = 4
AT_ONCE_S = 25.0
"""Far below the 280 s of the reward, and above what a busy machine needs to save."""
CALLS_A_STEP = 4
"""Of the reward, on each of two ranks: 4 prompts with 2 responses."""
VALIDATED = ["trainer.test_freq=2"]


def arguments(ranks: int, *more: str) -> list[str]:
    settings = [
        *GRPO,
        f"custom_reward_function.path={hanging_reward.__file__}",
        f"trainer.total_training_steps={STEPS}",
        f"trainer.n_gpus_per_node={ranks}",
        "trainer.checkpoint.save_freq=-1",
        *more,
    ]
    return list({setting.split("=")[0]: setting for setting in settings}.values())


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    folder = tmp_path_factory.mktemp("undisturbed")

    @cache
    def run(ranks: int, *more: str) -> Path:
        path = folder / str(len(list(folder.iterdir())))
        finish(path, *arguments(ranks, *more), **environment(folder))
        assert set(range(1, STEPS + 1)) <= set(metrics(path))
        return path

    return run


def environment(folder: Path, hangs_at: int = 0) -> dict[str, str]:
    return {hanging_reward.FOLDER: str(folder), hanging_reward.HANGS_AT: str(hangs_at)}


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + MAX_RUN_S
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            kill(process)
            raise AssertionError(process.communicate()[0])
        time.sleep(0.02)


def stop(
    process: subprocess.Popen[str], number: int, send: Callable[[int], object] | None = None
) -> tuple[str, float]:
    """Send signal ``number`` to the command, or by ``send``; return the output and the seconds to
    the end.
    """
    began = time.monotonic()
    (send or process.send_signal)(number)
    code, screen = wait_for_exit(process)
    seconds = time.monotonic() - began
    print(f"{seconds:.1f} s to exit")
    assert code == 85, screen
    assert seconds < AT_ONCE_S, screen
    return screen, seconds


def ends(run: Path, attempt: int = 1) -> dict[int, Any]:
    """The ranks' end records."""
    folder = run / "logs" / f"attempt_{attempt}"
    return {
        int(path.name.split("_")[1].split(".")[0]): json.loads(path.read_text())
        for path in folder.glob("rank_*.end.json")
    }


def rank_pid(run: Path, rank: int) -> int:
    path = run / "logs" / "attempt_1" / f"rank_{rank}.begin.json"
    return int(json.loads(path.read_text())["pid"])


@pytest.mark.parametrize(
    ("number", "calls", "more", "saved", "alone"),
    [
        (signal.SIGUSR2, 2 * CALLS_A_STEP + 1, [], 2, None),
        (signal.SIGHUP, 2 * CALLS_A_STEP + 1, VALIDATED, 2, 1),  # in the validation of step 2
    ],
)
def test_a_stop_while_rewards_hang(
    undisturbed: Callable[..., Path],
    tmp_path: Path,
    number: int,
    calls: int,
    more: list[str],
    saved: int,
    alone: int | None,
) -> None:
    """``alone``: the only rank that gets the signal."""
    run = tmp_path / "run"
    env = environment(tmp_path, calls)
    process = start(run, *arguments(2, *more), **env)
    hangs = [tmp_path / "hangs_0", tmp_path / "hangs_1"]
    wait_for(lambda: all(path.exists() for path in hangs), process)
    (tmp_path / hanging_reward.LET_GO).touch()
    send = None if alone is None else lambda n: os.kill(rank_pid(run, alone), n)
    screen, _ = stop(process, number, send)
    name = signal.Signals(number).name[3:]
    assert f"Asked to stop ({name}): saving step {saved}." in screen
    assert f"Asked to stop ({name}): saved at step {saved}." in screen
    assert (run / "checkpoints" / "latest").read_text().strip() == f"step_{saved}"
    records = ends(run)
    assert [(r["kind"], r["step"], r["stop"]) for r in records.values()] == [
        ("stopped", saved, name)
    ] * 2
    assert saved - 1 <= max(metrics(run)) <= saved
    finish(run, *arguments(2, *more), **env)
    assert_same(run, undisturbed(2, *more))


def test_a_stop_of_one_rank_during_the_start(tmp_path: Path) -> None:
    """Rank 1 reads a reward file that takes minutes, rank 0 waits for it in an exchange."""
    run = tmp_path / "run"
    slow = f"custom_reward_function.path={slow_import_reward.__file__}"
    process = start(run, *arguments(2, slow), **environment(tmp_path))
    wait_for((tmp_path / "hangs_1").exists, process)
    (tmp_path / hanging_reward.LET_GO).touch()
    screen, _ = stop(process, signal.SIGUSR2, lambda n: os.kill(rank_pid(run, 0), n))
    assert "Asked to stop (USR2) before the first update of this attempt" in screen
    records = ends(run)
    assert [(r["kind"], r["step"]) for r in records.values()] == [("stopped", 0)] * 2
    assert not metrics(run)
    settings = arguments(2, slow, "trainer.total_training_steps=1")
    finish(run, *settings, **environment(tmp_path))


EVERYTHING = (
    "trainer.test_freq=2",
    "trainer.val_before_train=true",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.rollout.over_sampling=1.5",
    "algorithm.max_staleness=1",
)
"""A run in which most of the phases of a step take place."""
SEEDS = [pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(1, 17)]


@pytest.mark.parametrize("seed", [0, *SEEDS])
def test_stops_at_random_instants(
    undisturbed: Callable[..., Path], tmp_path: Path, seed: int
) -> None:
    """Three stops: some time after a step, after the begin of an attempt, and after a later step.

    However fast the machine is, the second one comes before the end: an attempt has to start first.
    """
    rng = random.Random(seed)
    ranks = 1 + seed % 2
    whole = undisturbed(ranks, *EVERYTHING)
    run = tmp_path / "run"
    codes = []
    for attempt, (steps, most_s) in enumerate([(1, 0.5), (0, 2.0), (3, 0.5)], start=1):
        process = start(run, *arguments(ranks, *EVERYTHING), **environment(tmp_path))
        begun = run / f"logs/attempt_{attempt}/rank_0.begin.json"
        deadline = time.monotonic() + MAX_RUN_S
        while not begun.exists() or (steps and max(metrics(run), default=0) < steps):
            assert time.monotonic() < deadline
            if process.poll() is not None:
                break
            time.sleep(0.01)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(rng.uniform(0.0, most_s))
        process.send_signal(rng.choice([signal.SIGUSR2, signal.SIGTERM, signal.SIGHUP]))
        code, screen = wait_for_exit(process)
        assert code in (0, 85), screen
        codes.append(code)
    assert 85 in codes
    finish(run, *arguments(ranks, *EVERYTHING), **environment(tmp_path))
    assert_same(run, whole)
