"""``python -m benchmarks.train``: how far GRPO raises the validation reward in what ``make train``
does, for seeds 1 to 3.

``--quick`` takes a few steps of one seed, too few for a rise: it checks that the loss of SFT falls
and that the run folder is complete.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from time import perf_counter

from benchmarks.harness import Report, arguments
from trainer.base.metrics_file import METRICS_FILE, read_metrics

ROOT = Path(__file__).resolve().parents[1]
SEEDS = (1, 2, 3)
RUN_TIMEOUT_S = 900
RISE_BAR = 0.20
SECONDS_BAR = 180.0
QUICK = {"sft": 8, "grpo": 2}
"""Training steps of ``--quick``."""
RUN_FILES = (
    "config.yaml",
    "metrics.jsonl",
    "wandb/*run*",
    "checkpoints/step_*",
    "plots/tokens_per_micro_batch.png",
)
"""Patterns of files that every run folder holds at the end."""


def train(stage: str, seed: int, folder: Path, *more: str) -> None:
    """One run of ``experiment=demo_STAGE`` into ``folder``; its output is shown when it fails."""
    command = [sys.executable, "-m", "trainer", f"experiment=demo_{stage}", f"trainer.seed={seed}"]
    command += [f"trainer.default_local_dir={folder}", *more]
    environ = {"OMP_WAIT_POLICY": "PASSIVE", "WANDB_MODE": "offline", **os.environ}
    done = subprocess.run(
        command,
        cwd=ROOT,
        env=environ,
        capture_output=True,
        text=True,
        timeout=RUN_TIMEOUT_S,
        check=False,
    )
    if done.returncode:
        raise SystemExit(
            f"{' '.join(command)} failed "
            f"({done.returncode}):\n{done.stdout[-4000:]}{done.stderr[-4000:]}"
        )


def column(folder: Path, name: str) -> list[float]:
    """The values of a metric in the order of their steps."""
    records = read_metrics(folder / METRICS_FILE)
    return [float(record[name]) for record in records if name in record]


def measure(seed: int, report: Report, quick: bool) -> None:
    """Both stages with one seed: a row, and the checks of ``--quick``."""
    with tempfile.TemporaryDirectory() as base:
        runs = {stage: Path(base) / stage for stage in ("sft", "grpo")}
        options: dict[str, list[str]] = {stage: [] for stage in runs}
        if quick:
            for stage, steps in QUICK.items():
                options[stage] = [
                    f"trainer.total_training_steps={steps}",
                    "data.val_max_samples=16",
                ]
        began = perf_counter()
        train("sft", seed, runs["sft"], *options["sft"])
        weights = f"actor_rollout_ref.model.path={runs['sft'] / 'huggingface'}"
        train("grpo", seed, runs["grpo"], weights, *options["grpo"])
        seconds = perf_counter() - began
        rewards, losses = column(runs["grpo"], "val/reward"), column(runs["sft"], "train/loss")
        before, after = rewards[0], rewards[-1]
        report.add(seed=seed, before=before, after=after, rise=after - before, seconds=seconds)
        if quick:
            files = sum(any(runs[k].glob(pattern)) for k in runs for pattern in RUN_FILES)
            report.check("sft_loss_fall", losses[0] - losses[-1], 0.05)
            report.check("left_behind", files, 2 * len(RUN_FILES))


def main() -> int:
    """The command line; the exit code."""
    args = arguments((__doc__ or "").splitlines()[0])
    report = Report("make train: validation reward before and after GRPO")
    for seed in SEEDS[:1] if args.quick else SEEDS:
        measure(seed, report, args.quick)
    if not args.quick:
        rows = report.rows
        report.check("reward_rise_mean", sum(r["rise"] for r in rows) / len(rows), RISE_BAR)
        slowest = max(r["seconds"] for r in rows)
        report.check("seconds", slowest, SECONDS_BAR, at_most=True, clocked=True)
    return report.finish(args)


if __name__ == "__main__":
    raise SystemExit(main())
