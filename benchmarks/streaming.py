"""``python -m benchmarks.streaming``: a training step whose reward takes as long as its generation,
phase by phase and with answers judged while others are still generated.

One run's own parts (GRPO on the built-in task, builtin:tiny, one rank), built once; steps of both
ways take turns. The reward is a user's function that waits, as one that asks another machine does;
how long is set so that all answers of a step together take its workers as long as generating them
took.
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
from trainer.base.environment import RankInfo
from trainer.config import load
from trainer.ranks.world import join, leave
from trainer.run.build import Context, build
from trainer.run.step import rl_batch, update_policy

TITLE = "A step whose reward takes as long as its generation"
BAR = 0.8
"""Step time with streaming in that of phase by phase."""
REWARD = """
import time
from pathlib import Path

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(float(Path(__file__).with_name("delay").read_text()))
    return float(len(solution_str) % 2)
"""
WAYS = {"phase by phase": False, "streaming": True}


def settings(folder: Path, quick: bool) -> dict[str, Any]:
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
            "rollout": {
                "n": 8,
                "max_num_seqs": prompts * 2,
            },  # waves: answers of equal length end together
        },
        "trainer": {
            "default_local_dir": str(folder),
            "test_freq": -1,
            "total_training_steps": 10_000,
            "device": "cpu",
        },
        "custom_reward_function": {"path": str(folder / "reward.py")},
    }


def one_step(ctx: Context, number: int, streaming: bool) -> dict[str, float]:
    """Seconds of a step's phases."""
    rolling = ctx.rolling
    assert rolling is not None
    rolling.sampler = replace(rolling.sampler, streaming=streaming)
    with ctx.timers("step"):
        batch, _ = rl_batch(ctx, number)
        with ctx.timers("update_actor"):
            update_policy(ctx, batch, number)
    found = {name: ctx.timers.seconds(name) for name in ("step", "gen", "reward", "update_actor")}
    ctx.timers.end_step()
    return found


def measure(ctx: Context, folder: Path, report: Report, rounds: int, bar: float) -> None:
    delay, workers = folder / "delay", 1
    delay.write_text("0")
    samples = ctx.config.data.train_batch_size * ctx.config.actor_rollout_ref.rollout.n
    generating = [one_step(ctx, number, False)["gen"] for number in (1, 2, 3)][1:]
    judging: list[float] = []
    steps: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for number in range(rounds):
        judging.append(median(generating))  # a machine that slows down slows both
        delay.write_text(str(judging[-1] * workers / samples))
        for way in list(WAYS) if number % 2 else reversed(WAYS):
            steps[way].append(one_step(ctx, 4 + number, WAYS[way]))
        generating.append(steps["phase by phase"][-1]["gen"])
    for way, found in steps.items():
        middle = {name: median(s[name] for s in found) for name in found[0]}
        report.add(
            way=way,
            samples=samples,
            step_s=middle["step"],
            gen_s=middle["gen"],
            judging_s=median(judging),
            reward_after_s=middle["reward"],
            update_s=middle["update_actor"],
            engine_idle=1 - min(1.0, middle["gen"] / middle["step"]),
            reward_idle=1 - min(1.0, median(judging) / middle["step"]),
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
        info = RankInfo(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=None,
        )
        world = join(info, device="cpu", run_dir=folder, meet_s=60.0, timeout_s=600.0)
        try:
            ctx = build(config, folder, info, world)
            with ctx:
                measure(ctx, folder, report, 3 if quick else 7, 1.0 if quick else BAR)
        finally:
            leave()


def main(argv: list[str] | None = None) -> int:
    args = arguments(__doc__ or "", argv)
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    report = Report(TITLE)
    run(report, args.quick)
    return report.finish(args)


if __name__ == "__main__":
    sys.exit(main())
