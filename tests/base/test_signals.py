from __future__ import annotations

import signal
import subprocess
import sys

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


@pytest.mark.parametrize("name", ["SIGUSR2", "SIGTERM", "SIGINT"])
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
