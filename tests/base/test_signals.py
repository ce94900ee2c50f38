from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

from trainer.base import signals
from trainer.base.signals import shield_worker

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


def test_nobody_asked() -> None:
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


def test_children_started_while_held_get_the_signal_when_they_are_ready() -> None:
    with signals.held():
        process = subprocess.Popen([sys.executable, "-c", CHILD], stdout=subprocess.PIPE, text=True)
    process.send_signal(signal.SIGTERM)  # long before Python has started
    out, _ = process.communicate(timeout=200)
    assert (process.returncode, out.strip()) == (0, "TERM")
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


class Pids(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> torch.Tensor:
        assert get_worker_info() is not None
        return torch.tensor(os.getpid())


def test_loader_workers_outlive_the_groups_signals_but_not_their_loader() -> None:
    loader = DataLoader(
        Pids(), num_workers=2, worker_init_fn=shield_worker, prefetch_factor=1, timeout=200
    )
    with signals.held():
        batches = iter(loader)
    workers = {int(next(batches)), int(next(batches))}
    assert len(workers) == 2
    # A stranger's TERM: sent from another process, as Slurm's and the launcher's are.
    code = "import os, sys\nfor pid in sys.argv[2:]: os.kill(int(pid), int(sys.argv[1]))"
    for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGTERM, signal.SIGTERM):
        subprocess.run(
            [sys.executable, "-c", code, str(int(number)), *map(str, workers)],
            timeout=200,
            check=True,
        )
    assert {int(pid) for pid in batches} == workers
    del batches


def test_a_loader_can_still_terminate_a_hanging_worker() -> None:
    context = torch.multiprocessing.get_context("fork")
    ready = context.Event()
    worker = context.Process(target=hang, args=(ready,))
    with signals.held():
        worker.start()
    assert ready.wait(200)
    worker.terminate()
    worker.join(200)
    assert worker.exitcode == 0


def hang(ready: object) -> None:
    shield_worker()
    ready.set()  # type: ignore[attr-defined]
    time.sleep(300)
