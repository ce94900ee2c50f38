"""``python -m jobs``: what was launched, how it goes, and what to do about it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from trainer.base.command import run_command

DEFAULT_LEDGER = "runs/ledger.jsonl"
SUMMARY = "What was launched, how it goes, and what to do about it."
EXAMPLES = """examples:
  python -m jobs status                   all runs; -f until they have ended
  python -m jobs watch SWEEP/3            one run live: curves, phases, samples
  python -m jobs logs -f SWEEP/3          the log of rank 0, over all attempts
  python -m jobs resubmit SWEEP --state failed
RUN is a sweep, SWEEP/INDEX, a Slurm or W&B id, a run folder, a folder of runs,
or a pattern ('runs/lr*'); folders need no ledger. NO_COLOR=1 leaves colours
out. More in docs/jobs.md.
"""


Option = tuple[tuple[str, ...], dict[str, Any]]
"""Flags of an option and the keywords of ``add_argument``."""
COMPARE: list[Option] = [
    (("--metric",), {"action": "append", "help": "name or pattern, e.g. 'perf/*' (repeatable)"}),
    (
        ("--value",),
        {"default": "last", "help": "last (default), best, or mean-K: of the last K values"},
    ),
    (
        ("--axis",),
        {
            "choices": ("step", "tokens", "time"),
            "default": "step",
            "help": "compare at equal steps (default), tokens, or seconds in steps that count",
        },
    ),
    (
        ("--at",),
        {
            "default": "common",
            "help": "this much of the axis; common (default): as far as all runs are; "
            "end: each at its own",
        },
    ),
    (("--sort",), {"metavar": "KEY", "help": "by a metric, the best first, or a setting"}),
    (("--each-run",), {"action": "store_true", "help": "one row per run, seeds too"}),
    (("--csv",), {"type": Path, "metavar": "FILE", "help": "write CSV (-: to stdout)"}),
    (("--json",), {"type": Path, "metavar": "FILE", "help": "write JSON (-: to stdout)"}),
    (("--plot",), {"type": Path, "metavar": "FILE", "help": "draw the curves as a PNG"}),
]
COMMANDS: dict[str, tuple[str, bool, list[Option]]] = {
    "status": (
        "a table of runs",
        True,
        [
            (
                ("-f", "--follow"),
                {"action": "store_true", "help": "refresh it until all runs have ended"},
            ),
            (
                ("--json",),
                {"action": "store_true", "help": "one JSON line per run instead of a table"},
            ),
        ],
    ),
    "watch": (
        "a run live: curves, phases, memory, samples",
        True,
        [(("--once",), {"action": "store_true", "help": "draw one frame and end"})],
    ),
    "logs": (
        "the log of a rank",
        True,
        [
            (
                ("-f", "--follow"),
                {"action": "store_true", "help": "go on as the log grows, over all attempts"},
            ),
            (("--rank",), {"type": int, "default": 0}),
            (("--attempt",), {"type": int, "help": "default: the newest"}),
            (
                ("-n", "--lines"),
                {
                    "type": int,
                    "default": 200,
                    "help": "last lines to begin with (default: 200)",
                },
            ),
        ],
    ),
    "resubmit": ("submit ended runs again; they go on from their checkpoints", True, []),
    "cancel": ("end runs; running ones save first", True, []),
    "compare": ("runs side by side: settings that differ, metrics", True, COMPARE),
    "sync": (
        "send to W&B what its server lacks of the runs' metrics.jsonl",
        True,
        [(("--dry-run",), {"action": "store_true", "help": "print the commands only"})],
    ),
    "doctor": (
        "check Slurm, image, versions, binds, folders",
        False,
        [
            (("--image",), {"type": Path, "help": "an Apptainer image to look into"}),
            (("--digest",), {"help": "the digest it must have"}),
            (("--python",), {"default": "python3", "help": "the interpreter inside the image"}),
            (
                ("--bind",),
                {
                    "action": "append",
                    "default": [],
                    "help": "a folder that the image must see (may be repeated)",
                },
            ),
            (
                ("--folder",),
                {"type": Path, "default": Path("runs"), "help": "where run folders will go"},
            ),
        ],
    ),
}
"""Command -> its summary, whether it takes runs, and its options. The functions are in
``jobs.view.commands``.
"""


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = argparse.ArgumentParser(
        prog="python -m jobs",
        description=SUMMARY,
        epilog=EXAMPLES,
        formatter_class=argparse.RawTextHelpFormatter,
    )
    top.add_argument(
        "--ledger",
        type=Path,
        default=Path(os.environ.get("PLIMSOLL_LEDGER", DEFAULT_LEDGER)),
        help=f"the ledger (default: PLIMSOLL_LEDGER, or {DEFAULT_LEDGER})",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="sweep, sweep/index, Slurm or W&B id, run folder or pattern (default: all)",
    )
    runs.add_argument(
        "--state", help="only runs in this state: failed, cancelled, exhausted, lost, running, ..."
    )
    for name, (summary, takes_runs, options) in COMMANDS.items():
        parents = [runs] if takes_runs else []
        command = commands.add_parser(name, parents=parents, help=summary)
        for flags, settings in options:
            command.add_argument(*flags, **settings)
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; its exit code."""
    return run_command(lambda: _run(arguments))


def _run(arguments: list[str] | None) -> int:
    """Raises UserError for wrong input."""
    options = parser().parse_args(arguments)
    from jobs.view import commands

    return int(getattr(commands, options.command)(options))


if __name__ == "__main__":
    sys.exit(main())
