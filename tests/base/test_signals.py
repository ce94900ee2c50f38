from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from trainer.base import signals

CHILD = """
import os, signal, sys
from trainer.base import signals
signals.install()
for name in sys.argv[1:]:
    os.kill(os.getpid(), getattr(signal, name))
print(signals.requested())
"""


def child(*names: str) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-c", CHILD, *names],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    return done.returncode, done.stdout.strip()


def test_without_a_signal_nothing_is_requested() -> None:
    assert child() == (0, "None")


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGTERM", "SIGINT", "SIGHUP"])
def test_a_signal_is_a_request(name: str) -> None:
    assert child(name) == (0, name.removeprefix("SIG"))


def test_signals_that_come_twice_are_harmless_and_the_first_is_the_cause() -> None:
    assert child("SIGUSR2", "SIGUSR2", "SIGTERM", "SIGTERM", "SIGINT") == (0, "USR2")


def test_the_second_interrupt_ends_it() -> None:
    assert child("SIGINT", "SIGINT") == (-signal.SIGINT, "")


def test_a_signal_on_the_way_out_changes_nothing() -> None:
    """A process that has saved still has to end with its own code, however late the next signal
    comes.
    """
    code = """
import os, signal, sys
from trainer.base import signals
class Late:
    def __del__(self, kill=os.kill, pid=os.getpid(), numbers=signals.CAUGHT):
        for number in numbers:
            kill(pid, number)
signals.install()
late = Late()  # deleted when the interpreter is being taken down
sys.exit(85)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stderr) == (85, "")


def test_children_started_while_blocked_get_the_signal_when_they_are_ready() -> None:
    with signals.blocked():
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGTERM)  # long before Python has started
    out, _ = process.communicate(timeout=200)
    assert (process.returncode, out.strip()) == (0, "TERM")
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


LEAVING = """
import os, signal, sys, threading, time
from trainer.base import signals
def end(cause):
    print("end", cause, flush=True)
    return 85
signals.install()
signals.leave_at_once(end)
said = False
try:
    while True:
        try:
            if not said:
                said = True
                os.write(1, b"ready\\n")
            time.sleep(60)
        except BaseException as error:
            if sys.argv[1] == "swallows":
                continue
            raise
except signals.StopRequested as stop:
    print("raised", stop.cause)
    sys.exit(end(stop.cause))
"""


@pytest.mark.parametrize(
    ("how", "output"), [("lets go", "raised TERM\nend TERM\n"), ("swallows", "end TERM\n")]
)
def test_a_process_with_nothing_to_save_is_left_wherever_it_is(how: str, output: str) -> None:
    """Also when a library swallows the exception, or does not come back from a call."""
    process = subprocess.Popen(
        [sys.executable, "-c", LEAVING, how], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    rest, _ = process.communicate(timeout=60)
    assert (process.returncode, rest) == (85, output)


DEFERRED = """
import os, signal, threading
from trainer.base import signals
signals.install()
signals.leave_at_once(lambda cause: 1)
with signals.deferred():
    os.kill(os.getpid(), signal.SIGTERM)
assert not signals.leaves_at_once()
heard = threading.Event()
signals.on_request(lambda cause: heard.set())
signals.request("USR2")  # as of another rank, later
assert heard.wait(60)
try:
    signals.check()
except signals.StopRequested as stop:
    print(stop.cause, signals.requested())
"""


def test_once_there_is_something_to_lose_requests_wait_for_a_loop_that_can_be_left() -> None:
    done = subprocess.run(
        [sys.executable, "-c", DEFERRED], capture_output=True, text=True, timeout=200, check=False
    )
    assert (done.returncode, done.stdout) == (0, "TERM TERM\n"), done.stderr


def test_a_hangup_that_nohup_ignores_stays_ignored() -> None:
    code = "import os, signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n" + CHILD
    done = subprocess.run(
        [sys.executable, "-c", code, "SIGHUP"], capture_output=True, text=True, timeout=200
    )
    assert (done.returncode, done.stdout.strip()) == (0, "None")


def test_a_lost_terminal_is_a_request_and_no_error_of_what_is_printed() -> None:
    """ssh is gone: the terminal's other end is closed, and the process still prints and saves."""
    code = """
import os, signal, sys, time
from trainer.base import signals
signals.install()
with open(sys.argv[1], "w") as file:
    file.write("ready")
deadline = time.monotonic() + 60
while signals.requested() is None and time.monotonic() < deadline:
    time.sleep(0.01)
while os.isatty(1) and time.monotonic() < deadline:  # a thread lets go of it
    time.sleep(0.01)
print("saving", flush=True)
with open(sys.argv[1], "w") as file:
    file.write(str(signals.requested()))
os._exit(85)
"""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "state")
        pid, master = pty.fork()
        if pid == 0:
            os.execv(sys.executable, [sys.executable, "-c", code, str(file)])
        deadline = time.monotonic() + 100
        while not (file.exists() and file.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        os.close(master)
        _, status = os.waitpid(pid, 0)
        assert (os.waitstatus_to_exitcode(status), file.read_text()) == (85, "HUP")
