"""``python -m benchmarks.planner``: our plans against other trainers' published algorithms, on real
lengths.

Efficiency is cost computed / (ranks x critical path), 1 is perfect: ``micro`` when ranks wait for
each other after every micro-batch (ZeRO-2/3), ``step`` once a step (ZeRO-0/1). The bound is what no
plan can beat.

``ms`` is processor time of one core: the median of five runs of the same plan, then the slowest of
the batches, regimes and cost models of the setting. Held-out lengths (shuffled traces, other sizes
and ranks, synthetic lengths) keep the planner from being fitted to the settings of the table.
"""

from __future__ import annotations

from benchmarks.harness import Report, arguments
from benchmarks.planner_cases import read_lengths, settings
from benchmarks.planner_checks import hold_to_bars
from benchmarks.planner_rows import measure, summary
from trainer.batching import warm_up


def main(argv: list[str] | None = None) -> int:
    """The command line; the exit code."""
    args = arguments(
        __doc__ or "",
        argv,
        all={"action": "store_true", "help": "print every algorithm of every setting"},
    )
    report = Report("Planner: efficiency by who plans (mean over batches)")
    warm_up(256)
    for setting in settings(args.quick):
        lengths = read_lengths(setting.trace)
        if setting.cap(lengths) < int(lengths.max()):
            continue  # a hard cap below the longest sequence has no plan
        for row in measure(setting, lengths, 1 if args.quick or setting.sequences > 256 else 3):
            report.add(**row)
    hold_to_bars(report, args.quick)
    return report.finish(args, shown=report.rows if args.all else summary(report.rows))


if __name__ == "__main__":
    raise SystemExit(main())
