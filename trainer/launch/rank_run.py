"""One rank from its begin record to its end record, whatever ends it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer.base import metrics_file, rank_records, signals
from trainer.base.errors import (
    EXIT_BAD_NODE,
    EXIT_OK,
    EXIT_REQUEUE,
    EXIT_USER,
    Failure,
    PeerLost,
    as_user_error,
    first_line,
)
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.run_folder import log_tail
from trainer.launch.early_stop import leave_untrained

LAUNCHED = "PLIMSOLL_LAUNCHED"
"""Set to 1 for ranks of the launcher, which shows their errors itself, once and last."""

PEER_GONE = re.compile(
    r"Connection (closed|reset) by peer|Connection was likely closed|Broken pipe"
    r"|Timed out waiting \d+ ?ms for|timed out after \d+ ?ms|pair closure|wait timeout"
    r"|[Ww]atchdog caught collective operation timeout|communicator was aborted"
    r"|remote process exited or there was a network error|ncclRemoteError"
    r"|Connection refused|Socket Timeout|failed to recv, got 0 bytes",
    re.IGNORECASE,
)
"""What gloo, NCCL and torch's TCP store say when another rank is gone or does not answer."""


@dataclass(frozen=True)
class RankRun:
    """The records of one rank; nothing is written for one that was started by hand."""

    run_dir: Path
    folder: Path | None
    rank: int

    def begin(self) -> None:
        """Record that this rank runs. Raises OSError."""
        if self.folder is None:
            return
        rank_records.end_file(self.folder, self.rank).unlink(missing_ok=True)
        rank_records.write_begin(self.folder, self.rank)

    def returned(self, code: int) -> int:
        """Record the end of a rank that came to its end with ``code``. Returns the exit code."""
        if self.folder is None or code not in (EXIT_OK, EXIT_REQUEUE):
            return code
        kind = rank_records.FINISHED if code == EXIT_OK else rank_records.STOPPED
        written = rank_records.read_end(rank_records.end_file(self.folder, self.rank))
        if written is not None and written.kind == kind:
            return code  # of the step that it saved
        stop = signals.requested() if code == EXIT_REQUEUE else None
        self._write(kind, code, stop=stop)
        return code

    def failed(self, error: BaseException) -> int:
        """Report ``error`` and record it; return the exit code: 2 when the user can fix it, else 1.

        Errors that the user can fix (:func:`as_user_error`) and a Failure show no traceback unless
        HYDRA_FULL_ERROR=1. Under the launcher, which shows the record's text, nothing is printed.
        """
        user_error = as_user_error(error)
        explained = user_error or (error if isinstance(error, Failure) else None)
        if explained is not None and os.environ.get("HYDRA_FULL_ERROR") != "1":
            text = f"Error: {explained}"
        else:
            text = "".join(traceback.format_exception(error)).rstrip()
        code = 1 if user_error is None else EXIT_USER
        kind = kind_of(error)
        written = self._write(
            kind,
            code,
            stop=signals.requested(),
            message=first_line(explained or error),
            text=text,
        )
        if not written or os.environ.get(LAUNCHED) != "1":
            _print_error(text)
        return code

    def _write(
        self, kind: str, code: int, *, stop: str | None = None, message: str = "", text: str = ""
    ) -> bool:
        if self.folder is None:
            return False
        return rank_records.write_end(
            self.folder,
            self.rank,
            kind=kind,
            exit_code=code,
            step=metrics_file.last_step(self.run_dir / METRICS_FILE) or 0,
            stop=stop,
            message=message,
            text=text,
        )


def run_rank(run_dir: Path, body: Callable[[], int]) -> int:
    """Run ``body`` as this process's rank of ``run_dir``, with its records; return the exit code.

    Whatever ``body`` raises is reported. A node on which the begin record can't be written is bad:
    exit code 77.
    """
    folder = rank_records.attempt_folder(run_dir)
    rank = RankRun(run_dir, folder, rank_records.task_number())
    try:
        rank.begin()
    except OSError as error:
        _print_error(f"Error: {rank_records.host_name()} can't write to the run folder: {error}")
        return EXIT_BAD_NODE
    with _exits_reported(rank):
        try:
            return rank.returned(body())
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            cause = signals.requested()
            if cause is not None and signals.leaves_at_once():
                # StopRequested, or what a library or another rank made of it.
                return leave_untrained(run_dir, cause)
            return rank.failed(error)


def kind_of(error: BaseException) -> str:
    """The kind of an end record for ``error``."""
    if as_user_error(error) is not None:
        return rank_records.USER_ERROR
    links: list[BaseException] = []
    link: BaseException | None = error
    while link is not None and link not in links:
        links.append(link)
        link = link.__cause__ or link.__context__
    if any(_is_lost_peer(one) for one in links):
        return rank_records.LOST_PEER
    return rank_records.CRASH


def take_error(log: Path, end_file: Path) -> str:
    """The text of a rank's error, which is appended to its log; the end of its log without one."""
    end = rank_records.read_end(end_file)
    if end is None or not end.text:
        return log_tail(log)
    with contextlib.suppress(OSError), log.open("a", errors="backslashreplace") as file:
        file.write(end.text + "\n")
    return end.text


def _is_lost_peer(error: BaseException) -> bool:
    """Whether another process caused ``error``. Errors of torch.distributed are RuntimeErrors; an
    OSError with the same words is of a user's own connection.
    """
    if isinstance(error, PeerLost):
        return True
    return isinstance(error, RuntimeError) and PEER_GONE.search(str(error)) is not None


@contextlib.contextmanager
def _exits_reported(rank: RankRun) -> Iterator[None]:
    """Context in which ``os._exit`` of this process, by a user's file or a library, is an error.

    Without this a run that ends that way with code 0 would look as if it had finished. Forked
    children, which end with ``os._exit``, are not affected.
    """
    real_exit = os._exit
    owner = os.getpid()

    def reported_exit(status: int) -> None:
        if os.getpid() != owner:
            real_exit(status)
        caller = traceback.extract_stack(limit=2)[0]
        error = Failure(
            f"{caller.filename}, line {caller.lineno}, ended this process with os._exit({status}) "
            "before the run had finished: have it raise an exception, or return"
        )
        rank.failed(error)
        real_exit(1)

    os._exit = reported_exit  # type: ignore[assignment]
    try:
        yield
    finally:
        os._exit = real_exit


def _print_error(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()
