"""When a run saves, what it says about saving, and where it goes on: the keeper over a checkpointer
that only notes.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.config.helpers import run_of
from tests.run.ranks import Rank
from trainer.base.errors import Failure, UserError
from trainer.batching import ModelShape
from trainer.checkpoint import CheckpointSettings
from trainer.config import load
from trainer.experience.weight_sync import AgreedError
from trainer.rollout import EngineFailed
from trainer.run import checkpoints as keeping
from trainer.run.checkpoints import Keeper

SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=4, ffn=128, vocab=1000)
LARGE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000)


class Store:
    """Notes what it is told to save."""

    def __init__(self, run_dir: Path, ds: Any, settings: CheckpointSettings, **world: Any) -> None:
        self.root, self.settings, self.world = run_dir / "checkpoints", settings, world
        self.saved: list[tuple[int, float | None, bool]] = []
        self.states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.about: Any = None
        self.takes, self.has_room = Store.restored, True
        self.save_s: float | None = None
        self.last_failure = ""
        self.last_committed_step: int | None = None

    restored: Any = None

    def before_step(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return True

    def restore(self) -> Any:
        return self.takes

    def save(
        self, step: int, own: Any, shared: Any, metric: float | None, *, blocking: bool, about: Any
    ) -> bool:
        if self.has_room:
            self.saved.append((step, metric, blocking))
            self.states.append((own, shared))
            self.about = about
        return self.has_room

    def metrics(self) -> dict[str, float]:
        return {"ckpt/failures": 0.0}

    def close(self, timeout_s: float) -> None: ...

    @property
    def steps(self) -> list[int]:
        return [step for step, _, _ in self.saved]


class Clock:
    now = 1000.0

    def monotonic(self) -> float:
        return self.now

    time = monotonic


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(keeping, "time", made)
    monkeypatch.setattr(keeping, "Checkpointer", Store)
    monkeypatch.setattr(Store, "restored", None)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "1")
    return made


def keeper(
    run: Path, *, shape: ModelShape = SHAPE, validates: bool = True, **dotted: Any
) -> tuple[Keeper, Any]:
    config = load(run_of(**{f"trainer__{k}": v for k, v in dotted.items()}))
    ctx: Any = Rank(run)
    ctx.config, ctx.validates, ctx.total_steps = config, validates, 3000
    ctx.world = SimpleNamespace(
        rank=0, size=1, is_main=True, any=int, cpu_group=None, device=torch.device("cpu")
    )
    ctx.info = SimpleNamespace(local_world_size=1)
    ctx.engine = SimpleNamespace(
        ds=None, settings=SimpleNamespace(bf16=False, zero_stage=1), before_step=None
    )
    ctx.loaded = SimpleNamespace(shape=shape, frozen=None)
    made = Keeper(ctx)
    return made, made._store


def steps(
    made: Keeper,
    first: int,
    last: int,
    before: Callable[[int], object] = lambda step: None,
    **given: Any,
) -> None:
    for step in range(first, last + 1):
        before(step)
        metrics = given.get("metrics", {"train/nll": float(step)})
        made.after_step(step, metrics, last=given.get("end") == step, stop=None, sync=lambda: None)


def test_every_so_many_steps_and_at_the_end(tmp_path: Path, clock: Clock) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=3)
    steps(made, 1, 7, end=7)
    assert [(step, blocking) for step, _, blocking in store.saved] == [
        (3, False),
        (6, False),
        (7, True),
    ]


def test_every_so_many_minutes(tmp_path: Path, clock: Clock) -> None:
    """Steps of 70 s, two minutes: after each second one; a save of the other kind starts the
    minutes anew.
    """
    made, store = keeper(tmp_path, checkpoint__save_freq=7, checkpoint__save_interval_minutes=2)
    steps(made, 1, 10, before=lambda step: setattr(clock, "now", clock.now + 70))
    assert store.steps == [2, 4, 6, 7, 9]


def test_a_save_that_finds_no_buffer_is_made_after_the_next_step(
    tmp_path: Path, clock: Clock
) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=4)
    steps(made, 1, 6, before=lambda step: setattr(store, "has_room", step != 4))
    assert store.steps == [5]


def test_the_record_is_durable_before_the_save(tmp_path: Path, clock: Clock) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=1)
    made.after_step(
        1, {}, last=False, stop=None, sync=lambda: store.saved.append((-1, None, False))
    )
    assert store.steps == [-1, 1]


def test_a_stop_is_saved_and_noted(tmp_path: Path, clock: Clock) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=-1)
    made.after_step(4, {}, last=False, stop="USR2", sync=lambda: None)
    assert store.saved == [(4, None, True)]
    note = json.loads((tmp_path / "exit.json").read_text())
    assert (note["cause"], note["step"], note["attempt"]) == ("USR2", 4, 1)
    store.has_room = False
    store.last_failure = "checkpoint of step 5 failed: the writer process died"
    with pytest.raises(Failure, match=r"step 5 is not saved: .*the writer process died"):
        made.after_step(5, {}, last=True, stop=None, sync=lambda: None)
    store.last_failure = "checkpoint of step 5 failed: rank 0: Permission denied (step_5.tmp)"
    with pytest.raises(
        UserError, match=r"step 5 is not saved: .*Permission denied.* Have the folder made writable"
    ):
        made.after_step(5, {}, last=True, stop=None, sync=lambda: None)
    store.last_failure = "checkpoint of step 6 failed: rank 1: No space left on device"
    with pytest.raises(
        UserError, match=r"step 6 is not saved: .*No space left on device.* Free space"
    ):
        made.after_step(6, {}, last=True, stop=None, sync=lambda: None)


def test_who_is_asked_to_stop_needs_no_engine_any_more(tmp_path: Path, clock: Clock) -> None:
    def gone() -> None:
        raise EngineFailed("gone")

    made, store = keeper(tmp_path, checkpoint__save_freq=1)
    made._ctx.rolling = SimpleNamespace(settle=gone)
    with pytest.raises(EngineFailed):
        made.after_step(1, {}, last=False, stop=None, sync=lambda: None)
    made.after_step(1, {}, last=False, stop="USR2", sync=lambda: None)
    assert store.steps == [1]


def test_wrong_input_in_the_middle_of_a_run_stays_the_users_to_mend(
    tmp_path: Path, clock: Clock
) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=-1)
    for step, text in (
        (0, "bad. No step was trained yet"),
        (4, "bad. Step 4 is saved; the same command goes on"),
    ):
        error = made.lost(step, AgreedError("bad"), sync=lambda: None)
        assert isinstance(error, UserError) and str(error).startswith(text)
    assert store.saved == [(4, None, True)]


@pytest.mark.parametrize(
    ("margin", "now", "stops"), [(2.0, 5935, False), (2.0, 5945, True), (1.0, 5945, False)]
)
def test_the_job_stops_while_a_save_still_fits(
    tmp_path: Path,
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    margin: float,
    now: float,
    stops: bool,
) -> None:
    """A job that ends at 6,000 s, steps of 10 s, saves of 20 s."""
    monkeypatch.setenv("SLURM_JOB_END_TIME", "6000")
    monkeypatch.setenv("PLIMSOLL_SLURM", "1")
    made, store = keeper(tmp_path, checkpoint__save_margin=margin)
    store.save_s = 20.0
    clock.now += 10
    steps(made, 1, 1)
    clock.now = now
    assert made.stop_requested(None) == ("TIME" if stops else None)
    assert made.stop_requested("TERM") == "TERM"


def test_grace_time_is_held_against_what_was_measured(tmp_path: Path, clock: Clock) -> None:
    made, _ = keeper(tmp_path, shape=LARGE, grace_period_s=120)
    assert any(
        "is taken to need" in note and "trainer.grace_period_s=120" in note for note in made.notes
    )
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1, "time": 1, "ckpt/write_gbps": 50.0}\n{"step": 2, "time": 2}\n')
    made, _ = keeper(tmp_path, shape=LARGE, grace_period_s=120)
    assert not any("checkpoint" in note for note in made.notes)
    record.write_text('{"step": 1, "time": 1, "ckpt/write_gbps": 0.02}\n')
    made, _ = keeper(tmp_path, shape=LARGE, grace_period_s=120)
    assert any("at the 0.02 GB/s measured before" in note for note in made.notes)
    made, _ = keeper(tmp_path, shape=SHAPE, grace_period_s=120)
    assert made.notes == []


def test_the_best_by_default_is_the_validation_reward(tmp_path: Path, clock: Clock) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=1)
    assert (store.settings.best_metric, store.settings.best) == ("val/reward", "max")
    steps(made, 1, 1, metrics={"val/reward": 0.25})
    steps(made, 2, 2)
    assert [metric for _, metric, _ in store.saved] == [0.25, None]
    assert made.best is None  # that folder is gone, or never was
    (store.root / "step_1").mkdir(parents=True)
    assert made.best == (store.root / "step_1", "val/reward 0.25")
    assert keeper(tmp_path, validates=False)[1].settings.best_metric is None


@pytest.mark.parametrize(
    ("save", "test", "words"),
    [
        (100, 10, None),
        (100, 100, None),
        (-1, 10, None),
        (4000, 30, None),
        (100, -1, None),
        (100, 30, "only each 300th step"),
    ],
)
def test_saving_when_nothing_was_validated_is_said(
    tmp_path: Path, clock: Clock, save: int, test: int, words: str | None
) -> None:
    made, _ = keeper(tmp_path, checkpoint__save_freq=save, test_freq=test)
    assert [words in note for note in made.notes if words] == ([True] if words else [])
    assert words or made.notes == []
    assert (
        keeper(tmp_path, checkpoint__save_freq=save, test_freq=test, checkpoint__keep_best=0)[
            0
        ].notes
        == []
    )


def test_the_best_by_another_metric(tmp_path: Path, clock: Clock) -> None:
    made, store = keeper(
        tmp_path, checkpoint__save_freq=1, checkpoint__best_metric="train/nll", validates=False
    )
    assert (store.settings.best_metric, store.settings.best) == ("train/nll", "min")
    steps(made, 1, 2)
    assert [metric for _, metric, _ in store.saved] == [1.0, 2.0]


def test_a_metric_that_there_is_not_is_an_error_after_the_first_step(
    tmp_path: Path, clock: Clock
) -> None:
    made, _ = keeper(tmp_path, checkpoint__best_metric="train/nil", checkpoint__best_mode="min")
    with pytest.raises(
        UserError, match=r"best_metric=train/nil is no metric.*did you mean 'train/nll'.*val/reward"
    ):
        steps(made, 1, 1)
    made, _ = keeper(tmp_path, checkpoint__best_metric="val/reward")  # validated later
    steps(made, 1, 1)


def test_what_is_saved_comes_back(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, store = keeper(tmp_path, checkpoint__save_freq=1)
    made._ctx.train()  # type: ignore[attr-defined]
    steps(made, 1, 1, metrics={"val/reward": 0.5})
    own, shared = store.states[0]
    assert store.about["wandb_id"] == "abc" and {"commit", "torch", "deepspeed"} < set(store.about)
    found = SimpleNamespace(
        step=1, folder=store.root / "step_1", rank_state=own, rank_states=[own], global_state=shared
    )
    monkeypatch.setattr(Store, "restored", found)
    again, _ = keeper(tmp_path, checkpoint__save_freq=1)
    assert (again.step, again._ctx.samples_seen, again._best.value) == (1, 4, 0.5)
    assert again.notes == [f"Going on from {found.folder} (step 1)"]
    del shared["best"]
    found.rank_state, found.rank_states = None, [own, own]
    again, _ = keeper(tmp_path, checkpoint__save_freq=1)
    assert "2 rank(s) wrote it, 1 go on: cost, python, numpy, torch begin anew" in again.notes
    assert "[WARNING] it was written by another version and lacks best" in again.notes


def test_goodput_is_part_of_every_steps_metrics(tmp_path: Path, clock: Clock) -> None:
    made, _ = keeper(tmp_path)
    assert {"ckpt/failures", "goodput/ettr", "goodput/attempts"} <= made.metrics().keys()
    with made:
        pass
    assert json.loads((tmp_path / "logs/attempt_1/clock.json").read_text())["number"] == 1


@pytest.mark.parametrize("elsewhere", [False, True])
def test_a_rank_that_has_not_heard_of_the_commit_does_not_save_alone(
    tmp_path: Path, clock: Clock, elsewhere: bool
) -> None:
    made, store = keeper(tmp_path)
    store.last_committed_step = 4
    made._ctx.world.any = lambda flag: max(flag, elsewhere)  # type: ignore[misc,assignment]
    said = str(made.lost(4, Failure("3 restarts in a row"), sync=lambda: None))
    assert "Step 4 is saved" in said and store.steps == ([4] if elsewhere else [])


def test_a_metric_of_rank_0_alone_may_choose_the_best(tmp_path: Path, clock: Clock) -> None:
    made, store = keeper(
        tmp_path,
        checkpoint__save_freq=1,
        checkpoint__best_metric="goodput/ettr",
        checkpoint__best_mode="max",
    )
    made._ctx.world.is_main = False  # type: ignore[misc]
    steps(made, 1, 1)
    made._ctx.world.is_main = True  # type: ignore[misc]
    with pytest.raises(UserError, match="goodput/ettr is no metric"):
        steps(made, 2, 2)
    steps(made, 3, 3, metrics={"goodput/ettr": 0.9})
    assert store.saved[-1] == (3, 0.9, False)
