"""What every rank leaves about its beginning and its end: the records that decide what an attempt's
end is believed to be.

``logs/attempt_N/rank_R.begin.json``  written by rank R when it starts
``logs/attempt_N/rank_R.end.json``    written by rank R before it exits: kind, step, message

A rank without an end record was killed, or its node is lost; one without a begin record never ran.
Standard library only: the batch script reads the records outside the image.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from trainer.base import atomic
from trainer.base.full_disk import ASKED_TO_STOP_S, WAIT_S
from trainer.base.json_files import Fields, is_count, is_number, is_text, optional, read_object
from trainer.base.masking import mask
from trainer.base.rank_info import ATTEMPT, SLURM_SWITCH
from trainer.base.run_folder import log_folder

FINISHED = "finished"
"""The rank did all that the run asked for."""
STOPPED = "stopped"
"""Asked to stop, saved at a step boundary: a later attempt continues."""
USER_ERROR = "user_error"
"""Wrong input: it would end the same way again."""
CRASH = "crash"
"""An error of this rank that is no wrong input."""
LOST_PEER = "lost_peer"
"""Another process of the run did not come, is gone, or did not answer in time."""
KINDS = (FINISHED, STOPPED, USER_ERROR, CRASH, LOST_PEER)
FAILED = (USER_ERROR, CRASH, LOST_PEER)

END_FIELDS: Fields = {
    "kind": lambda value: value in KINDS,
    "exit_code": is_count,
    "host": is_text,
    "time": is_number,
    "step": is_count,
    "stop": optional(is_text),
    "message": lambda value: isinstance(value, str),
    "text": lambda value: isinstance(value, str),
}

MAX_TEXT = 64 * 1024
"""Characters of an error's text that a record holds, the last ones."""


@dataclass(frozen=True, kw_only=True)
class RankEnd:
    """The contents of ``rank_R.end.json``; ``END_FIELDS`` says what each field has to hold."""

    kind: str
    """One of ``KINDS``."""
    exit_code: int
    """The exit code that the rank is about to end with."""
    host: str
    time: float
    """time.time() of the end: the file's own time may be another machine's."""
    step: int = 0
    """The newest step that was logged, or saved."""
    stop: str | None = None
    """Why a rank stopped: the signal that it got, or TIME when the time limit was near. With an
    error: the signal that it had got before.
    """
    message: str = ""
    """First line of the error."""
    text: str = ""
    """What the user is shown of the error: its message, or a traceback."""


@dataclass(frozen=True, kw_only=True)
class RankRecord:
    """What is known of one rank of an attempt."""

    host: str = ""
    """Slurm's name of its node; empty when the rank never began."""
    end: RankEnd | None = None
    """None: it left no record of its end."""


def host_name(env: Mapping[str, str] | None = None) -> str:
    """This node's name: Slurm's, where there is one."""
    env = os.environ if env is None else env
    return env.get("SLURMD_NODENAME") or socket.gethostname()


def task_number(env: Mapping[str, str] | None = None) -> int:
    """The number of this process among the run's: its rank; 0 without launcher and Slurm.

    Processes on nodes that hold only vLLM servers have the numbers after the last rank's.
    """
    env = os.environ if env is None else env
    # As in rank_from_environment: under srun a RANK is what somebody's shell has left behind.
    text = env.get("SLURM_PROCID" if env.get(SLURM_SWITCH) == "1" else "RANK", "0")
    return int(text) if text.isdigit() else 0


def attempt_folder(run_dir: Path, env: Mapping[str, str] | None = None) -> Path | None:
    """The log folder of this attempt; None for a rank that was started by hand, without a
    number.
    """
    env = os.environ if env is None else env
    number = env.get(ATTEMPT, "")
    return log_folder(run_dir, int(number)) if number.isdigit() else None


def begin_file(folder: Path, rank: int) -> Path:
    """The begin record of a rank in an attempt's log folder."""
    return folder / f"rank_{rank}.begin.json"


def end_file(folder: Path, rank: int) -> Path:
    """The end record of a rank in an attempt's log folder."""
    return folder / f"rank_{rank}.end.json"


def write_begin(folder: Path, rank: int) -> None:
    """Record that ``rank`` has begun on this node. Raises OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    value = {"host": host_name(), "pid": os.getpid(), "time": time.time()}
    atomic.write_json(begin_file(folder, rank), value, durable=False, wait_s=WAIT_S)


def write_end(
    folder: Path,
    rank: int,
    *,
    kind: str,
    exit_code: int,
    step: int = 0,
    stop: str | None = None,
    message: str = "",
    text: str = "",
) -> bool:
    """Record the end of ``rank``; False when it can't be written (a full disk is a likely reason
    for an end) within some seconds.
    """
    end = RankEnd(
        kind=kind,
        exit_code=exit_code,
        host=host_name(),
        time=time.time(),
        step=step,
        stop=stop,
        message=mask(message),
        text=mask(text[-MAX_TEXT:]),
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_json(end_file(folder, rank), asdict(end), wait_s=ASKED_TO_STOP_S)
    except OSError:
        return False
    return True


def read_end(file: Path) -> RankEnd | None:
    """The end record in ``file``; None when there is none, or none that is whole."""
    values = read_object(file, END_FIELDS)
    if not {"kind", "exit_code", "host", "time"} <= set(values):
        return None
    return RankEnd(**{name: value for name, value in values.items() if name in END_FIELDS})


def read_records(folder: Path) -> dict[int, RankRecord]:
    """The records of all ranks in an attempt's log folder, by rank."""
    records: dict[int, RankRecord] = {}
    for rank in sorted({*_ranks(folder, ".begin.json"), *_ranks(folder, ".end.json")}):
        end = read_end(end_file(folder, rank))
        host = read_object(begin_file(folder, rank), {"host": is_text}).get("host", "")
        if not host and end is not None:
            host = end.host
        records[rank] = RankRecord(host=host, end=end)
    return records


def _ranks(folder: Path, suffix: str) -> list[int]:
    names = [path.name for path in folder.glob(f"rank_*{suffix}")]
    numbers = [name.removeprefix("rank_").removesuffix(suffix) for name in names]
    return [int(number) for number in numbers if number.isascii() and number.isdigit()]
