"""Of two launches into one run folder only one gets it, and what lives is never overwritten."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from trainer.base import atomic, run_owner
from trainer.base.errors import UserError
from trainer.base.run_owner import LOCAL, SLURM, Owner, claim, new_launch, new_owner, owner_of

ROUNDS = 50
WAIT_S = 120.0


def lives(owners: Mapping[Path, Owner | None]) -> dict[Path, str]:
    """The owners that live without asking Slurm."""
    texts = {run: run_owner.process_life(run, owner) for run, owner in owners.items()}
    return {run: text for run, text in texts.items() if text is not None}


def dead(kind: str = LOCAL) -> Owner:
    """An owner whose process has ended: that number lives, but started at another time."""
    return replace(new_owner("old", kind, "s/0"), pid_start=1)


def race(folder: Path, barrier: Barrier, answers: multiprocessing.Queue[list[str]]) -> None:
    """Claim ``ROUNDS`` folders, each at the same time as another process."""
    won = []
    for number in range(ROUNDS):
        barrier.wait(WAIT_S)
        try:
            launch = new_launch()
            claim({folder / str(number): new_owner(launch, SLURM)}, lives)
            won.append(f"{number} {launch}")
        except UserError:
            continue
    answers.put(won)
    barrier.wait(WAIT_S)  # an owner that has ended would be free


def test_of_two_launches_at_once_one_gets_the_folder(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    answers: multiprocessing.Queue[list[str]] = context.Queue()
    processes = [context.Process(target=race, args=(tmp_path, barrier, answers)) for _ in range(2)]
    for process in processes:
        process.start()
    won = sorted(answers.get(timeout=WAIT_S) + answers.get(timeout=WAIT_S))
    for process in processes:
        process.join(WAIT_S)
    launches = {number: launch for number, launch in (line.split() for line in won)}
    assert len(won) == len(launches) == ROUNDS
    for number, launch in launches.items():
        owner = owner_of(tmp_path / number)
        assert owner is not None and owner.launch == launch


def test_a_living_owner_is_named_and_stays(tmp_path: Path) -> None:
    first = new_owner("a", LOCAL)
    claim({tmp_path / "x": first}, lives)
    owners = {tmp_path / name: new_owner("b", SLURM, "s/1") for name in ("w", "x", "y")}
    with pytest.raises(UserError) as caught:
        claim(owners, lives)
    text = str(caught.value)
    assert f"process {os.getpid()} on {socket.gethostname()}" in text and "launched 2" in text
    assert "it runs; wait for it or end it, or set another trainer.default_local_dir" in text
    assert owner_of(tmp_path / "x") == first
    assert not (tmp_path / "w").exists() and not (tmp_path / "y").exists()


@pytest.mark.parametrize("kind", [LOCAL, SLURM])
def test_the_folder_of_a_launch_that_died_is_free(tmp_path: Path, kind: str) -> None:
    """Also that of one which died between its claim and sbatch."""
    atomic.write_json(tmp_path / "owner.json", vars(dead(kind)))
    owner = new_owner("b", LOCAL)
    with run_owner.held(tmp_path, owner, lives):
        assert owner_of(tmp_path) == owner
    claim({tmp_path: new_owner("c", LOCAL)}, lives)  # given back, though this process lives


def test_a_launch_that_fails_takes_nothing(tmp_path: Path) -> None:
    """One folder of several can't be had: the others go back to what they were."""
    before = dead()
    atomic.write_json(tmp_path / "owner.json", vars(before))
    (tmp_path / "file").write_text("")
    owners = {path: new_owner("b", LOCAL) for path in (tmp_path, tmp_path / "file" / "run")}
    with pytest.raises(UserError, match=r"can't be written \(Not a directory\)"):
        claim(owners, lives)
    assert owner_of(tmp_path) == before


def test_what_changed_while_slurm_was_asked_is_seen(tmp_path: Path) -> None:
    """Another launch took the folder between the look at its owner and the claim."""

    def slow_lives(owners: Mapping[Path, Owner | None]) -> dict[Path, str]:
        answer = lives(owners)
        if owner_of(tmp_path) is None:
            claim({tmp_path: new_owner("quick", LOCAL)}, lives)
        return answer

    with pytest.raises(UserError, match="it runs"):
        claim({tmp_path: new_owner("slow", LOCAL)}, slow_lives)
    owner = owner_of(tmp_path)
    assert owner is not None and owner.launch == "quick"


def test_who_trains_in_a_folder_has_it_whatever_its_record_says(tmp_path: Path) -> None:
    code = (
        "import sys, pathlib; from trainer.checkpoint.store.lease import Lease\n"
        "lease = Lease(pathlib.Path(sys.argv[1]), 1); print('held', flush=True)\n"
        "sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdin is not None and holder.stdout is not None
    try:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(UserError, match=f"taken: process {holder.pid} on .* trains in it"):
            claim({tmp_path: new_owner("b", LOCAL)}, lives)
        assert not (tmp_path / "owner.json").exists()
    finally:
        holder.stdin.close()
        holder.wait(WAIT_S)
        holder.stdout.close()
    claim({tmp_path: new_owner("b", LOCAL)}, lives)


@pytest.mark.parametrize(
    ("age_s", "lease_s", "free"),
    [(5.0, None, False), (5.0, 3.0, True), (5.0, 50.0, False), (3600.0, None, True)],
    ids=["just begun", "has trained", "trained before", "never trained"],
)
def test_a_process_of_another_machine(
    tmp_path: Path, age_s: float, lease_s: float | None, free: bool
) -> None:
    """It can't be seen from here: the lease tells, once rank 0 has had the time to take it."""
    owner = replace(new_owner("a", LOCAL), host="elsewhere", since=time.time() - age_s)
    atomic.write_json(tmp_path / "owner.json", vars(owner))
    if lease_s is not None:
        atomic.write_json(tmp_path / "lease.json", {"since": time.time() - lease_s})
    assert (lives({tmp_path: owner}) == {}) is free
