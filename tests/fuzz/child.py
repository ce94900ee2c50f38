"""One command in a forked child: no interpreter start, and whatever it does ends with it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

LIMIT_S = 120.0
"""Far above what any of the commands takes, on a busy machine too."""


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int
    """Exit code; negative for a signal, and ``-SIGALRM`` when it ran too long."""
    out: str
    err: str


def preload() -> None:
    """Import what the children need, once."""
    import hydra  # noqa: F401

    import trainer.config.entry
    import trainer.plan.report  # noqa: F401


def run(
    command: str, argv: Sequence[str], cwd: Path, environment: Mapping[str, str], scratch: Path
) -> Ended:
    """Run ``command`` (``trainer``, ``plan``, ``export`` or ``jobs``) to its end, at most
    ``LIMIT_S``.
    """
    out = scratch / "out"
    err = scratch / "err"
    sys.stdout.flush()
    sys.stderr.flush()
    child = os.fork()
    if child == 0:
        _in_child(command, argv, cwd, environment, out, err)
    status = _wait(child)
    texts = [path.read_bytes().decode(errors="replace") for path in (out, err)]
    return Ended(os.waitstatus_to_exitcode(status), *texts)


def _wait(child: int) -> int:
    deadline = time.monotonic() + LIMIT_S + 30
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return status
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            return os.waitpid(child, 0)[1]
        time.sleep(0.005)


def _in_child(
    command: str,
    argv: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    out: Path,
    err: Path,
) -> None:
    code = 99
    try:
        os.setpgid(0, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        for descriptor, path in ((1, out), (2, err)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), descriptor)
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
        sys.stderr = open(  # noqa: SIM115
            2, "w", encoding="utf-8", errors="backslashreplace", closefd=False
        )
        os.chdir(cwd)
        os.environ.update(environment)
        sys.argv = [command, *argv]
        code = _call(command)
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = 98
        os._exit(code)


def _call(command: str) -> int:
    from hydra.core.global_hydra import GlobalHydra

    from trainer import launch
    from trainer.base.command import run_command

    GlobalHydra.instance().clear()
    launch.run = _no_ranks  # type: ignore[assignment]
    return run_command(_main_of(command))


def _no_ranks(*arguments: object, **options: object) -> int:
    """Instead of the ranks: everything before them is what is tried here."""
    sys.stdout.write("the ranks would start\n")
    return 0


def _main_of(command: str) -> Callable[[], int]:
    if command == "trainer":
        from trainer.__main__ import main

        return main
    if command == "plan":
        from trainer.plan.__main__ import main as plan

        return lambda: plan(sys.argv[1:])
    if command == "export":
        from trainer.export import main as export

        return lambda: export(sys.argv[1:])
    from jobs.__main__ import main as jobs

    return lambda: jobs(sys.argv[1:])
