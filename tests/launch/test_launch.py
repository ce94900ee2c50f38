"""Ranks start, fail, are stopped and end together, whatever each of them does."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.launch import rank as small_rank
from tests.tracking.terminal import drain
from trainer.base.rank_records import begin_file, read_records
from trainer.base.run_folder import log_folder
from trainer.launch.screen import LogText

PARENT = """
import sys
from pathlib import Path
from trainer.base import signals
from trainer.launch import run
signals.install()
sys.exit(run({}, Path(sys.argv[1]), int(sys.argv[2])))
"""
BOUND_S = 200.0
"""Limit of a wait that ends by itself, far beyond what it takes on a busy machine."""
SHORT_GRACE = {"PLIMSOLL_KILL_GRACE_S": "0.5"}
"""For ranks that never end by themselves."""


def start(
    folder: Path, ranks: int, plan: str, stdout: int = subprocess.PIPE, **env: str
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", PARENT, str(folder), str(ranks)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={k: v for k, v in os.environ.items() if not k.startswith("OMP_")}
        | {
            "PLIMSOLL_WORKER_MODULE": "tests.launch.rank",
            "RANK_PLAN": plan,
            "PLIMSOLL_KILL_GRACE_S": str(BOUND_S),
        }
        | env,
        start_new_session=True,
    )


def finish(parent: subprocess.Popen[str]) -> tuple[int, str]:
    out, err = parent.communicate(timeout=BOUND_S)
    assert err == ""
    return parent.returncode, out


def wait_until_started(folder: Path, ranks: int, name: str = "started") -> None:
    deadline = time.monotonic() + BOUND_S
    while len([p for p in folder.glob(f"{name}_*") if p.read_text()]) < ranks:
        assert time.monotonic() < deadline, "the ranks didn't start"
        time.sleep(0.01)


def pids(folder: Path) -> list[int]:
    notes = [p.read_text() for name in ("started", "grandchild") for p in folder.glob(f"{name}_*")]
    # A rank may be killed before it has written its own.
    return [int(note.split()[0]) for note in notes if note]


def is_alive(number: int) -> bool:
    try:
        return psutil.Process(number).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def assert_gone(numbers: list[int]) -> None:
    deadline = time.monotonic() + BOUND_S
    while alive := [n for n in numbers if is_alive(n)]:
        assert time.monotonic() < deadline, f"orphans: {alive}"
        time.sleep(0.01)


def test_ranks_have_their_numbers_and_share_the_cores(tmp_path: Path) -> None:
    code, out = finish(
        start(tmp_path, 2, "", SLURM_PROCID="7", SLURM_JOB_ID="9", PLIMSOLL_SLURM="1")
    )
    assert code == 0 and out == "rank 0 is here\n"
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    for rank in (0, 1):
        line = (tmp_path / f"started_{rank}").read_text()
        assert (
            f"rank={rank}, world_size=2, local_rank={rank}, local_world_size=2, "
            "master_addr='127.0.0.1'" in line
        )
        assert "['SLURM_JOB_ID']" in line
        assert int(line.split()[-1]) <= threads
        log = tmp_path / "logs" / "attempt_1" / f"rank_{rank}.log"
        assert log.read_text() == f"rank {rank} is here\n" and log.stat().st_mode & 0o077 == 0


def test_one_rank_runs_in_this_process(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 1, ""))
    assert (code, out) == (0, "rank 0 is here\n")
    (record,) = read_records(tmp_path / "logs/attempt_1").values()
    assert record.end is not None and (record.end.kind, record.end.exit_code) == ("finished", 0)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_that_ends_itself_with_0_has_not_finished(tmp_path: Path, ranks: int) -> None:
    parent = start(tmp_path, ranks, f"{ranks - 1}=exit", PLIMSOLL_KILL_GRACE_S="10")
    out, err = parent.communicate(timeout=BOUND_S)
    assert parent.returncode == 1
    last = (out + err).splitlines()[-1]
    assert last.startswith(f"Error: {Path(small_rank.__file__)}, line ") and "os._exit(0)" in last
    end = read_records(tmp_path / "logs/attempt_1")[ranks - 1].end
    assert end is not None and (end.kind, end.exit_code) == ("crash", 1)


def test_a_rank_without_a_record_of_its_end_has_not_finished(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 2, "1=leave early", PLIMSOLL_KILL_GRACE_S="10"))
    assert code == 1
    assert "Rank 1 failed first: its process exited with 0 before the run had finished." in out


@pytest.mark.parametrize("wrong", ["wrong", "wrong late"])
def test_every_rank_records_its_end_and_wrong_input_is_the_cause(
    tmp_path: Path, wrong: str
) -> None:
    assert finish(start(tmp_path, 3, f"0=peer,1=crash,2={wrong}"))[0] == 2
    folder = tmp_path / "logs/attempt_1"
    records = read_records(folder)
    ends = [record.end for record in records.values() if record.end is not None]
    assert [end.kind for end in ends] == ["lost_peer", "crash", "user_error"]
    assert [end.exit_code for end in ends] == [1, 1, 2]
    assert [end.message for end in ends] == [
        "Connection closed by peer",
        "the tensor is on fire",
        "data.train_files=x: no such file",
    ]
    assert {record.host for record in records.values()} == {os.uname().nodename}
    assert all(path.stat().st_mode & 0o077 == 0 for path in folder.glob("*.json"))


@pytest.mark.parametrize("failing", [0, 1])
def test_the_failing_ranks_error_is_last_on_the_screen(tmp_path: Path, failing: int) -> None:
    """The other rank fails too, because its peer has gone, and says so: it is not to blame."""
    code, out = finish(start(tmp_path, 2, f"{failing}=crash,{1 - failing}=peer"))
    assert code == 1
    assert out.splitlines()[-1] == "RuntimeError: the tensor is on fire"
    assert f"Rank {failing} failed first: exit code 1." in out
    assert "Connection closed by peer" not in out
    logs = tmp_path / "logs" / "attempt_1"
    assert "the tensor is on fire" in (logs / f"rank_{failing}.log").read_text()
    assert "Connection closed by peer" in (logs / f"rank_{1 - failing}.log").read_text()
    kinds = [record.end.kind for record in read_records(logs).values() if record.end is not None]
    assert sorted(kinds) == ["crash", "lost_peer"] and kinds[failing] == "crash"


def test_wrong_input_is_one_message_and_exit_code_2(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 2, "0=wrong,1=wrong"))
    assert code == 2
    assert out == "rank 0 is here\nError: data.train_files=x: no such file\n"


def test_wrong_input_shows_its_traceback_when_asked(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 2, "1=wrong", HYDRA_FULL_ERROR="1"))
    assert code == 2 and "Traceback" in out


def test_a_rank_that_died_without_an_error_shows_the_end_of_its_log(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 2, "0=save,1=segfault"))
    assert code == 128 + signal.SIGSEGV
    assert "Rank 1 failed first: killed by SIGSEGV." in out and out.splitlines()[-1] == "last words"
    assert (tmp_path / "saved_0").read_text() == "TERM"


def test_a_rank_stuck_in_a_collective_is_ended_with_all_it_started(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 3, "0=finish,1=deaf,2=crash", **SHORT_GRACE))
    assert code == 1
    assert out.splitlines()[-1] == "RuntimeError: the tensor is on fire"
    assert_gone(pids(tmp_path))


def test_a_failed_rank_that_hangs_on_its_way_out_does_not_hold_the_run(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 2, "0=deaf,1=hang", **SHORT_GRACE))
    assert code == 1 and out.splitlines()[-1] == "RuntimeError: the tensor is on fire"
    assert "Rank 1 failed first: exit code 1." in out
    assert_gone(pids(tmp_path))


def test_processes_that_a_rank_left_are_ended(tmp_path: Path) -> None:
    assert finish(start(tmp_path, 2, "1=leave"))[0] == 0
    assert_gone(pids(tmp_path))


def test_a_rank_that_goes_on_after_the_end_is_named(tmp_path: Path) -> None:
    code, out = finish(start(tmp_path, 2, "1=deaf", PLIMSOLL_FINISH_GRACE_S="0.5", **SHORT_GRACE))
    assert code != 0
    assert "Rank 1 failed first: it went on long after another rank had finished." in out
    assert_gone(pids(tmp_path))


@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_reaches_every_rank_and_the_run_wants_to_go_on(
    tmp_path: Path, number: signal.Signals
) -> None:
    parent = start(tmp_path, 2, "0=save,1=save")
    wait_until_started(tmp_path, 2)
    parent.send_signal(number)
    code, _ = finish(parent)
    assert code == 85
    assert {(tmp_path / f"saved_{r}").read_text() for r in (0, 1)} == {
        number.name.removeprefix("SIG")
    }


def test_a_rank_that_was_asked_to_stop_alone_takes_the_others_along(tmp_path: Path) -> None:
    """Before the ranks meet it has no other way to tell them."""
    parent = start(tmp_path, 2, "0=save,1=save")
    wait_until_started(tmp_path, 2)
    begin = begin_file(log_folder(tmp_path, 1), 1)
    os.kill(json.loads(begin.read_text())["pid"], signal.SIGUSR2)
    assert finish(parent)[0] == 85
    assert (tmp_path / "saved_0").read_text() == "TERM"
    assert (tmp_path / "saved_1").read_text() == "USR2"


def test_a_signal_before_python_is_ready_is_not_lost(tmp_path: Path) -> None:
    code, _ = finish(start(tmp_path, 2, "0=save,1=save", RANK_SIGNALLED_EARLY="1"))
    assert code == 85
    assert (tmp_path / "saved_0").read_text() == "USR2"


def test_a_second_interrupt_quits_at_once(tmp_path: Path) -> None:
    parent = start(tmp_path, 2, "0=deaf,1=deaf")
    wait_until_started(tmp_path, 2, "grandchild")
    parent.send_signal(signal.SIGINT)
    wait_until_started(tmp_path, 2, "heard")
    parent.send_signal(signal.SIGINT)
    code, _ = finish(parent)
    assert code == 130
    assert_gone(pids(tmp_path))


def test_no_orphan_survives_the_launcher(tmp_path: Path) -> None:
    parent = start(tmp_path, 2, "0=deaf,1=deaf")
    wait_until_started(tmp_path, 2, "grandchild")
    parent.kill()
    parent.communicate(timeout=BOUND_S)
    assert_gone(pids(tmp_path))


def test_a_terminal_gets_the_live_line_and_the_log_its_last_state(tmp_path: Path) -> None:
    leader, follower = pty.openpty()
    parent = start(tmp_path, 2, "0=show", stdout=follower, TERM="xterm")
    os.close(follower)
    text = drain(leader)
    assert parent.wait(BOUND_S) == 0
    assert "\x1b[" in text and "3/3" in text and "reward 0.75" in text
    *steps, line = [
        row.strip()
        for row in (tmp_path / "logs/attempt_1/rank_0.log").read_text().splitlines()
        if "step" in row
    ]
    assert steps == [f"step {step}/3 · reward {0.25 * step}" for step in (1, 2, 3)]
    assert "3/3" in line and "reward 0.75" in line and "\x1b" not in line


def test_log_text_is_the_last_state_of_each_line() -> None:
    text = LogText()
    assert text.feed(b"1 of 3\r2 of 3\r") == b""
    assert text.feed(b"3 of 3\r\n\x1b[31mre") == b"3 of 3\n"
    assert text.feed(b"d\x1b[0m\nnext") == b"red\n"
    assert text.end() == b"next"


def test_an_attempt_with_a_number_gets_no_second_one(tmp_path: Path) -> None:
    (tmp_path / "logs/attempt_4").mkdir(parents=True)
    parent = PARENT.replace("int(sys.argv[2])", "int(sys.argv[2]), attempt=4")
    done = subprocess.run(
        [sys.executable, "-c", parent, str(tmp_path), "2"],
        capture_output=True,
        timeout=BOUND_S,
        check=False,
        env=os.environ
        | {"PLIMSOLL_WORKER_MODULE": "tests.launch.rank", "RANK_PLAN": "", "MASTER_PORT": "1"},
    )
    assert done.returncode == 0 and [p.name for p in (tmp_path / "logs").iterdir()] == ["attempt_4"]
    assert (tmp_path / "logs/attempt_4/rank_1.log").exists()
    # The launcher's own MASTER_PORT is not for its ranks: rank 0 publishes its own.
    assert "master_port=None" in (tmp_path / "started_0").read_text()
