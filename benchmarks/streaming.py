"""``python -m benchmarks.streaming``: a training step whose reward takes as long as its generation,
phase by phase and with responses scored while others are still generated.

The parts of a run (GRPO on the built-in task, builtin:tiny, one rank) are built once; steps of both
ways take turns. The reward is a user's function that waits, like one that asks another machine. It
waits so long that scoring all responses of a step takes its workers as long as generating them.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

from benchmarks.harness import Report, arguments
from trainer.base.rank_info import rank_from_environment
from trainer.config import load
from trainer.ranks.world import join, leave
from trainer.run.build import build
from trainer.run.context import RunContext
from trainer.run.step import training_step

TITLE = "A step whose reward takes as long as its generation"
BAR = 0.8
"""Most step time with streaming, in multiples of step time phase by phase."""
REWARD = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(Path(__file__).with_name("delay").read_text()))
    return float(len(solution_str) % 2)
"""
WAYS = {"phase by phase": False, "streaming": True}


def settings(folder: Path, quick: bool) -> dict[str, Any]:
    """Settings of the run, whose folder is ``folder``."""
    prompts = 8 if quick else 32
    return {
        "data": {
            "task": "arithmetic",
            "train_batch_size": prompts,
            "max_prompt_length": 64,
            "max_response_length": 32 if quick else 128,
            "num_workers": 1,
        },
        "actor_rollout_ref": {
            "model": {"path": "builtin:tiny"},
            "actor": {"ppo_mini_batch_size": prompts, "ppo_max_token_len_per_gpu": 4096},
            # Few slots: with all responses at once, those of equal length would end together.
            "rollout": {"n": 8, "max_num_seqs": prompts * 2},
        },
        "trainer": {
            "default_local_dir": str(folder),
            "test_freq": -1,
            "total_training_steps": 10_000,
            "device": "cpu",
        },
        "custom_reward_function": {"path": str(folder / "reward.py")},
    }


def one_step(ctx: RunContext, number: int, streaming: bool) -> dict[str, float]:
    """Seconds of a step's phases."""
    collector = ctx.collector
    assert collector is not None
    collector.sampler = replace(collector.sampler, streaming=streaming)
    training_step(ctx, number, iter(()))
    seconds = {name: ctx.timers.seconds(name) for name in ("step", "gen", "reward", "update_actor")}
    ctx.timers.end_step()
    return seconds


def measure(ctx: RunContext, folder: Path, report: Report, rounds: int, bar: float) -> None:
    """Add a row per way and the check of their step times."""
    delay = folder / "delay"
    workers = 1
    delay.write_text("0")
    samples = ctx.config.data.train_batch_size * ctx.config.actor_rollout_ref.rollout.n
    generating = [one_step(ctx, number, False)["gen"] for number in (1, 2, 3)][1:]
    scoring: list[float] = []
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        scoring.append(median(generating))  # a machine that slows down slows both
        delay.write_text(str(scoring[-1] * workers / samples))
        for way in list(WAYS) if number % 2 else reversed(WAYS):
            steps[way].append(one_step(ctx, 4 + number, WAYS[way]))
        generating.append(steps["phase by phase"][-1]["gen"])
    for way, phases in steps.items():
        middle = {name: median(seconds[name] for seconds in phases) for name in phases[0]}
        report.add(
            way=way,
            samples=samples,
            step_s=middle["step"],
            gen_s=middle["gen"],
            judging_s=median(scoring),
            reward_after_s=middle["reward"],
            update_s=middle["update_actor"],
            engine_idle=1 - min(1.0, middle["gen"] / middle["step"]),
            reward_idle=1 - min(1.0, median(scoring) / middle["step"]),
        )
    times = [row["step_s"] for row in report.rows if row["way"] in WAYS]
    name = "step time with streaming in that of phase by phase"
    report.check(name, times[1] / times[0], bar, at_most=True, clocked=True)


def run(report: Report, quick: bool) -> None:
    """Add the rows and the check."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        config = load(settings(folder, quick))
        info = rank_from_environment({})
        world = join(info, device="cpu", run_dir=folder, meet_s=60.0, timeout_s=600.0)
        try:
            ctx = build(config, folder, world)
            with ctx:
                measure(ctx, folder, report, 3 if quick else 7, 1.0 if quick else BAR)
        finally:
            leave()


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code."""
    args = arguments(__doc__ or "", argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(TITLE)
    run(report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
