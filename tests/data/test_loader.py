from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.data.toy import Toy, encoder
from trainer.base import signals
from trainer.base.errors import UserError
from trainer.base.signals import StopRequested
from trainer.data import (
    FileDataset,
    Fingerprint,
    Keys,
    Loader,
    Position,
    check_samples,
    worker_count,
)

ROOT = Path(__file__).resolve().parents[2]


def take(loader: Loader, batches: int) -> list[list[int]]:
    """Indices of the next batches, across epochs."""
    out: list[list[int]] = []
    while len(out) < batches:
        for batch in loader:
            out.append([e.index for e in batch])
            if len(out) == batches:
                break
    return out


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_rows_that_a_run_will_meet_are_found_before_it_begins(workers: int) -> None:
    toy = Toy(200, bad=150)
    loader = Loader(toy, batch_size=4, seed=3)
    met = {i for batch in take(Loader(Toy(200), batch_size=4, seed=3), 30) for i in batch}
    assert set(loader.upcoming(30)) == met and sorted(loader.upcoming(51)) == list(range(200))
    assert loader.upcoming(51)[:120] == loader.upcoming(50)[:120] == loader.upcoming(30)
    with pytest.raises(UserError, match=r"^toy, row 150: bad$"):
        check_samples(toy, loader.upcoming(50), num_workers=workers)
    check_samples(toy, [i for i in range(200) if i != 150], num_workers=workers)
    with pytest.raises(
        UserError,
        match=r"^toy, row 150: bad \(2 of 3 rows can't be trained on; this is the first\)$",
    ):
        check_samples(toy, [149, 150, 150], num_workers=workers)
    ticks = iter(range(100))
    order = [*range(150), *range(151, 200), 150]  # a second for each 64: the bad one is not come to
    checked = check_samples(toy, order, num_workers=workers, limit_s=3.0, clock=lambda: next(ticks))
    assert (checked.samples, checked.cut_prompts, checked.cut_responses) == (3 * 64, 0, 0)


@pytest.mark.parametrize("workers", [0, 2])
def test_samples_that_are_cut_are_counted(tmp_path: Path, workers: int) -> None:
    rows = [{"prompt": "p" * (k % 7), "response": "r" * (k % 5)} for k in range(300)]
    file = tmp_path / "d.jsonl"
    file.write_text("".join(json.dumps(r) + "\n" for r in rows if r["prompt"] and r["response"]))
    cutting = encoder(
        max_prompt_length=len("<user>pppp<assistant>"), max_response_length=4, truncation="right"
    )
    dataset = FileDataset([file], Keys(response="response", answer_required=False), cutting)
    checked = check_samples(dataset, range(len(dataset)), num_workers=workers)
    kept = [r for r in rows if r["prompt"] and r["response"]]
    assert checked.samples == len(kept) > 64
    assert checked.cut_prompts == sum(len(r["prompt"]) > 4 for r in kept)
    assert checked.cut_responses == sum(len(r["response"]) + 1 > 4 for r in kept)


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("persistent", [True, False])
def test_resume_goes_on_with_the_very_next_sample(workers: int, persistent: bool) -> None:
    """Also with other numbers of workers before and after, in mid-epoch and exactly at an epoch's
    end.
    """
    options: dict[str, Any] = {
        "batch_size": 4,
        "seed": 3,
        "persistent_workers": persistent,
        "prefetch_factor": 3,
    }
    whole = take(Loader(Toy(22), **options), 14)
    assert len({i for batch in whole[:5] for i in batch}) == 20
    for stop in (0, 4, 5, 6, 13):
        with Loader(Toy(22), num_workers=workers, **options) as first:
            before = take(first, stop)
            state = json.loads(json.dumps(first.state_dict()))
        assert (state["epoch"], state["offset"], state["samples"]) == (
            stop // 5,
            stop % 5 * 4,
            stop * 4,
        )
        with Loader(Toy(22), num_workers=2 - workers, **options) as second:
            second.load_state_dict(state)
            after = take(second, 14 - stop)
        assert before + after == whole


def test_iterating_ends_with_the_epoch_and_prefetch_does_not_move_the_position() -> None:
    with Loader(Toy(10), batch_size=5, num_workers=1, prefetch_factor=4) as loader:
        assert len(loader) == 2
        loader.start()
        assert loader.position == Position()
        assert [len(b) for b in loader] == [5, 5]
        assert loader.position == Position(epoch=1, offset=0, samples=10)
        assert [len(b) for b in loader] == [5, 5]
        assert loader.epoch == 2


def test_state_loaded_while_workers_run_discards_what_they_prefetched() -> None:
    with Loader(Toy(12), batch_size=3, num_workers=2) as loader:
        state = loader.state_dict()
        first = take(loader, 3)
        loader.load_state_dict(state)
        assert take(loader, 3) == first


def test_validation_keeps_the_short_last_batch_and_the_order() -> None:
    loader = Loader(Toy(7), batch_size=3, shuffle=False, drop_last=False)
    assert [[e.index for e in b] for b in loader] == [[0, 1, 2], [3, 4, 5], [6]]
    assert len(loader) == 3


def test_a_batch_that_cannot_be_filled_is_an_error() -> None:
    with pytest.raises(
        UserError, match=r"data.train_batch_size=8 .* 7 samples .* type data.train_batch_size=7"
    ):
        Loader(Toy(7), batch_size=8)


def test_other_data_other_seed_other_order_are_refused_on_resume() -> None:
    state = Loader(Toy(8), batch_size=2, seed=1).state_dict()
    swapped = Toy(8, fingerprint=Fingerprint(name="new.jsonl (8 samples)", digest="x"))
    with pytest.raises(UserError, match=r"made on toy, this run reads new.jsonl \(8 samples\)"):
        Loader(swapped, batch_size=2, seed=1).load_state_dict(state)
    with pytest.raises(UserError, match=r"Type data.seed=1"):
        Loader(Toy(8), batch_size=2, seed=2).load_state_dict(state)
    with pytest.raises(UserError, match=r"Type data.shuffle=True"):
        Loader(Toy(8), batch_size=2, seed=1, shuffle=False).load_state_dict(state)


def test_resume_with_a_larger_batch_starts_the_next_epoch_when_the_rest_is_too_short() -> None:
    first = Loader(Toy(10), batch_size=3)
    take(first, 2)
    for workers in (0, 1):
        with Loader(Toy(10), batch_size=8, num_workers=workers, persistent_workers=False) as second:
            second.load_state_dict(first.state_dict())
            assert len(take(second, 2)[0]) == 8
            assert second.position == Position(epoch=3, offset=0, samples=22)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_bad_sample_is_the_users_error_at_its_turn(workers: int) -> None:
    with Loader(Toy(8, bad=5), batch_size=2, shuffle=False, num_workers=workers) as loader:
        assert take(loader, 2) == [[0, 1], [2, 3]]
        with pytest.raises(UserError, match=r"^toy, row 5: bad$"):
            take(loader, 1)
        assert loader.position.samples == 4


def test_a_bug_in_a_worker_shows_its_traceback() -> None:
    with (
        Loader(Toy(8, bug=1), batch_size=2, shuffle=False, num_workers=1) as loader,
        pytest.raises(RuntimeError, match="ZeroDivisionError: bug"),
    ):
        take(loader, 1)


def test_a_dead_worker_is_an_error_within_seconds_that_names_what_it_loaded() -> None:
    started = time.monotonic()
    with Loader(Toy(8, crash=5), batch_size=2, shuffle=False, num_workers=2) as loader:
        assert take(loader, 2) == [[0, 1], [2, 3]]
        with pytest.raises(
            RuntimeError,
            match=r"data worker 0 .* was killed by SIGKILL.* from 4 on in epoch 0 of toy",
        ):
            take(loader, 1)
    assert time.monotonic() - started < 300  # not after the loader's patience of 600 s


def test_a_silent_worker_is_an_error_after_the_timeout() -> None:
    with (
        Loader(Toy(8, hang=0), batch_size=2, shuffle=False, num_workers=1, timeout_s=0.2) as loader,
        pytest.raises(RuntimeError, match=r"gave no answer within 0.2 s"),
    ):
        take(loader, 1)


def test_workers_are_capped_by_the_cores_of_the_rank() -> None:
    assert worker_count(0, 1) == 0
    assert 1 <= worker_count(10_000, 1) <= (os.cpu_count() or 1)
    assert worker_count(8, 10_000) == 1


SCRIPT = """
import json, sys
from trainer.base import signals
signals.install()
from tests.data.toy import Toy, encoder
from trainer.data import Loader
loader = Loader(Toy(64), batch_size=4, num_workers=2, prefetch_factor=2)
loader.start()
def write(x): print(json.dumps(x), flush=True)
write([w.pid for w in loader._workers])
sys.stdin.readline()
write([[e.index for e in b] for b in loader])
write(signals.requested())
sys.stdin.readline()
"""


def test_workers_outlive_a_signal_to_the_group_and_die_with_their_parent() -> None:
    """Slurm signals every process of a step; the batches of the step in progress must still arrive.
    After kill -9 of the rank no worker stays behind.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        workers = json.loads(process.stdout.readline())
        for number in (signal.SIGTERM, signal.SIGUSR2, signal.SIGTERM):
            os.killpg(process.pid, number)
        process.stdin.write("\n")
        process.stdin.flush()
        expected = [[e.index for e in b] for b in Loader(Toy(64), batch_size=4)]
        assert json.loads(process.stdout.readline()) == expected
        assert json.loads(process.stdout.readline()) in ("TERM", "USR2")
        assert len(workers) == 2 and all(alive(pid) for pid in workers)
    finally:
        process.kill()
        process.wait(200)
    deadline = time.monotonic() + 200
    while any(alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(alive(pid) for pid in workers)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except OSError:
        return False


class NeverReady(Toy):
    def __getitem__(self, index: int) -> Any:
        time.sleep(200)
        return super().__getitem__(index)


def test_a_stop_does_not_wait_for_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals._request, "cause", "USR2")
    with Loader(NeverReady(40), batch_size=4, num_workers=1) as loader:
        with pytest.raises(StopRequested):
            next(iter(loader))
        assert loader.position == Position()


@pytest.mark.parametrize("workers", [0, 1])
def test_a_batch_that_was_not_trained_on_comes_again(workers: int) -> None:
    with Loader(Toy(40), batch_size=4, seed=1, num_workers=workers) as loader:
        take(loader, 1)
        position = loader.position
        batches = take(loader, 2)
        loader.go_back(position)
        assert take(loader, 2) == batches
