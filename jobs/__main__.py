"""``python -m jobs``: what was launched, how it goes, and what to do about it."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainer.base.errors import EXIT_USER, UserError

DEFAULT_LEDGER = "runs/ledger.jsonl"
SUMMARY = "What was launched, how it goes, and what to do about it."
EXAMPLES = """examples:
  python -m jobs status                   all runs; -f refreshes until they have ended
  python -m jobs logs -f SWEEP/3          the log of rank 0, over all attempts
  python -m jobs resubmit SWEEP --state failed
RUN is a sweep, SWEEP/INDEX, a Slurm id or a run folder. NO_COLOR=1 leaves colours out. More in docs/jobs.md.
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
        help=f"the ledger file (default: PLIMSOLL_LEDGER, or {DEFAULT_LEDGER})",
    )
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    runs = argparse.ArgumentParser(add_help=False)
    runs.add_argument(
        "runs",
        nargs="*",
        metavar="RUN",
        help="sweep, sweep/index, Slurm id, or run folder (default: all)",
    )
    runs.add_argument(
        "--state", help="only runs in this state: failed, cancelled, exhausted, lost, running, ..."
    )

    status = commands.add_parser("status", parents=[runs], help="a table of runs")
    status.add_argument(
        "-f", "--follow", action="store_true", help="refresh it until all runs have ended"
    )
    status.add_argument(
        "--json", action="store_true", help="one JSON line per run instead of a table"
    )
    logs = commands.add_parser("logs", parents=[runs], help="the log of a rank")
    logs.add_argument(
        "-f", "--follow", action="store_true", help="go on as the log grows, over all attempts"
    )
    logs.add_argument("--rank", type=int, default=0)
    logs.add_argument("--attempt", type=int, help="default: the newest")
    logs.add_argument(
        "-n", "--lines", type=int, default=200, help="last lines to begin with (default: 200)"
    )
    commands.add_parser(
        "resubmit",
        parents=[runs],
        help="submit ended runs again; they go on from their checkpoints",
    )
    commands.add_parser("cancel", parents=[runs], help="end runs; running ones save first")
    compare = commands.add_parser("compare", parents=[runs], help="metrics of runs side by side")
    compare.add_argument(
        "--metric", action="append", help="a name in metrics.jsonl (may be repeated)"
    )
    compare.add_argument(
        "--at", type=int, help="at this step (default: the last one that all runs have)"
    )
    sync = commands.add_parser(
        "sync", parents=[runs], help="send offline W&B folders to the server, in attempt order"
    )
    sync.add_argument("--dry-run", action="store_true", help="print the commands only")
    doctor = commands.add_parser(
        "doctor", help="check Slurm, image, versions, binds and folders before a sweep"
    )
    doctor.add_argument("--image", type=Path, help="an Apptainer image to look into")
    doctor.add_argument("--digest", help="the digest it must have")
    doctor.add_argument("--python", default="python3", help="the interpreter inside the image")
    doctor.add_argument(
        "--bind",
        action="append",
        default=[],
        help="a folder that the image must see (may be repeated)",
    )
    doctor.add_argument(
        "--folder", type=Path, default=Path("runs"), help="where run folders will go"
    )
    return top


def main(arguments: list[str] | None = None) -> int:
    """Run one command; wrong input is one message and exit code 2."""
    given = parser().parse_args(arguments)
    from jobs.view import commands

    try:
        return int(getattr(commands, given.command)(given))
    except UserError as error:
        sys.stderr.write(f"Error: {error}\n")
        return EXIT_USER
    except (BrokenPipeError, KeyboardInterrupt):
        return 130


if __name__ == "__main__":
    sys.exit(main())
