"""``python -m benchmarks.learning``: whether each algorithm learns.

By how much it raises the validation reward of the demo, from the same SFT weights and with the
demo's number of responses. Runs lie in ``--folder``. The same command goes on where it was
interrupted: what is finished there is read, what was begun is resumed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Report, arguments
from benchmarks.train import column, train
from trainer.base.metrics_file import METRICS_FILE, read_metrics

SEEDS = (1, 2, 3)
RISE_BAR = 0.15
STEPS = {"sft": 180, "grpo": 80}
QUICK_STEPS = {"sft": 8, "grpo": 2}

_TWO_UPDATES = ("actor_rollout_ref.actor.ppo_mini_batch_size=16",)
"""With one optimizer step an iteration the ratio is 1, and a loss that clips it never clips."""
ALGORITHMS: Mapping[str, Sequence[str]] = {
    "grpo": (),
    "rloo": (),
    "reinforce_plus_plus": (),
    "ppo": (
        # 80 steps are few for a critic: it learns faster than the policy, and alone at first.
        "actor_rollout_ref.actor.ppo_epochs=1",
        "critic.ppo_epochs=4",
        "critic.optim.lr=3.0e-4",
        "trainer.critic_warmup=5",
    ),
    "dapo": (
        # An answer has up to 8 tokens: nothing is overlong.
        "reward_model.overlong_buffer.enable=false",
        "algorithm.filter_groups.max_num_gen_batches=4",
    ),
    "gspo": _TWO_UPDATES,
    "cispo": _TWO_UPDATES,
}
"""Preset ``algorithm=NAME`` -> settings beside it."""


@dataclass(frozen=True)
class Outcome:
    """One finished run."""

    before: float
    after: float
    step_s: float
    """Mean time of a step."""

    @property
    def rise(self) -> float:
        """By how much ``val/reward`` rose."""
        return self.after - self.before


def is_finished(folder: Path, steps: int) -> bool:
    """Whether the run in ``folder`` has taken ``steps`` steps and logged the last one."""
    file = folder / METRICS_FILE
    return file.exists() and any(record.get("step") == steps for record in read_metrics(file))


class Progress:
    """Says which run of how many is under way, on the error stream."""

    def __init__(self, runs: int) -> None:
        self._runs = runs
        self._begun = 0

    def begin(self, what: str) -> None:
        """The next run."""
        self._begun += 1
        self.say(f"{self._begun}/{self._runs} {what}")

    def say(self, text: str) -> None:
        """One line."""
        print(f"[learning] {text}", file=sys.stderr, flush=True)


def run(stage: str, seed: int, folder: Path, options: Sequence[str], steps: int) -> str:
    """Take or finish one run, unless it is finished; what was done."""
    if is_finished(folder, steps):
        return f"was finished in {folder}"
    began = perf_counter()
    train(stage, seed, folder, f"trainer.total_training_steps={steps}", *options)
    return f"took {perf_counter() - began:.0f} s"


def outcome(folder: Path) -> Outcome:
    """What a finished run has logged."""
    rewards = column(folder, "val/reward")
    seconds = statistics.mean(column(folder, "timing/step"))
    return Outcome(rewards[0], rewards[-1], seconds)


def measure(
    algorithms: Sequence[str], seeds: Sequence[int], folder: Path, *, quick: bool
) -> dict[str, list[Outcome]]:
    """The outcome of each algorithm, by seed; all of a seed begin from the same weights."""
    steps = QUICK_STEPS if quick else STEPS
    small = ["data.val_max_samples=16"] if quick else []
    outcomes: dict[str, list[Outcome]] = {name: [] for name in algorithms}
    progress = Progress(len(seeds) * (1 + len(algorithms)))
    for seed in seeds:
        base = folder / f"seed_{seed}"
        progress.begin(f"sft, seed {seed}: {steps['sft']} steps")
        progress.say(run("sft", seed, base / "sft", small, steps["sft"]))
        for name in algorithms:
            options = [
                f"actor_rollout_ref.model.path={base / 'sft' / 'huggingface'}",
                f"algorithm={name}",
                "actor_rollout_ref.rollout.n=8",
                "trainer.export_hf=false",
                *ALGORITHMS[name],
                *small,
            ]
            progress.begin(f"{name}, seed {seed}: {steps['grpo']} steps")
            progress.say(run("grpo", seed, base / name, options, steps["grpo"]))
            outcomes[name].append(outcome(base / name))
    return outcomes


def add_rows(report: Report, outcomes: Mapping[str, Sequence[Outcome]]) -> None:
    """A row for each algorithm: means over the seeds, and the smallest and largest rise."""
    for name, runs in outcomes.items():
        rises = [one.rise for one in runs]
        report.add(
            algorithm=name,
            seeds=len(runs),
            before=statistics.mean(one.before for one in runs),
            after=statistics.mean(one.after for one in runs),
            rise=statistics.mean(rises),
            least=min(rises),
            most=max(rises),
            step_s=statistics.mean(one.step_s for one in runs),
        )


def command_line(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The options, checked."""
    names = list(ALGORITHMS)
    return arguments(
        f"Whether each algorithm raises the demo's validation reward by {RISE_BAR} or more.",
        argv,
        algorithms={
            "nargs": "+",
            "choices": names,
            "default": names,
            "metavar": "NAME",
            "help": f"some of {', '.join(names)} (all)",
        },
        seeds={
            "nargs": "+",
            "type": int,
            "default": list(SEEDS),
            "metavar": "N",
            "help": "seeds, each with SFT weights of its own (1 2 3)",
        },
        folder={
            "type": Path,
            "default": Path("runs/learning"),
            "help": "where the runs lie (%(default)s)",
        },
    )


def main() -> int:
    """The command line; the exit code."""
    args = command_line()
    report = Report("validation reward before and after 80 steps")
    folder = args.folder.resolve() / ("quick" if args.quick else "full")
    outcomes = measure(args.algorithms, args.seeds, folder, quick=args.quick)
    add_rows(report, outcomes)
    if not args.quick:
        for name, runs in outcomes.items():
            rise = statistics.mean(one.rise for one in runs)
            report.check(f"rise_{name}", rise, RISE_BAR)
    return report.finish(args)


if __name__ == "__main__":
    raise SystemExit(main())
