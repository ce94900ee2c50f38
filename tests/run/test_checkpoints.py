"""``RunCheckpoints`` over a checkpointer that only records calls: saves, messages and resuming."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.checkpoint.test_power_cut import save
from tests.config.helpers import minimal_settings
from tests.run.ranks import Rank
from trainer.base.errors import Failure, UserError
from trainer.base.model_shape import ModelShape
from trainer.base.rank_records import read_records
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store.disk import Disk
from trainer.config import load
from trainer.ranks.agreement import AgreedError
from trainer.rollout import EngineFailed
from trainer.run import checkpoints as run_checkpoints
from trainer.run import save_interval, save_time
from trainer.run.checkpoints import RunCheckpoints

SHAPE = ModelShape(hidden=64, layers=2, heads=4, kv_heads=4, ffn=128, vocab=1000)
LARGE = ModelShape(hidden=4096, layers=32, heads=32, kv_heads=32, ffn=11008, vocab=32000)


class RecordingCheckpointer:
    """Records the saves that are requested."""

    def __init__(
        self, run_dir: Path, ds: Any, settings: CheckpointSettings, world: Any, **options: Any
    ) -> None:
        self.root = run_dir / "checkpoints"
        self.settings = settings
        self.saved: list[tuple[int, float | None, bool]] = []
        self.states: list[tuple[dict[str, Any], dict[str, Any]]] = []
        self.about: Any = None
        self.healthy: list[bool] = []
        self.has_room = True
        self.room_at_try = -1
        self.tries = 0
        self.save_s: float | None = None
        self.last_failure = ""
        self.last_committed_step: int | None = None

    restored: Any = None

    def before_step(self) -> None: ...

    def wait(self, timeout_s: float) -> bool:
        return True

    def restore(self) -> Any:
        return RecordingCheckpointer.restored

    def save(
        self,
        step: int,
        rank_state: Any,
        global_state: Any,
        metric: float | None,
        *,
        blocking: bool,
        healthy: bool,
        about: Any,
    ) -> bool:
        self.tries += 1
        if self.has_room or self.tries == self.room_at_try:
            self.healthy.append(healthy)
            self.saved.append((step, metric, blocking))
            self.states.append((rank_state, global_state))
            self.about = about
            return True
        return False

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

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    fake = Clock()
    monkeypatch.setattr(run_checkpoints, "time", fake)
    monkeypatch.setattr(save_time, "time", fake)
    monkeypatch.setattr(save_interval, "time", fake)
    monkeypatch.setattr(run_checkpoints, "Checkpointer", RecordingCheckpointer)
    monkeypatch.setattr(RecordingCheckpointer, "restored", None)
    monkeypatch.setenv("PLIMSOLL_ATTEMPT", "1")
    return fake


def make_checkpoints(
    run: Path, *, shape: ModelShape = SHAPE, validates: bool = True, **dotted: Any
) -> tuple[RunCheckpoints, Any]:
    config = load(minimal_settings(**{f"trainer__{k}": v for k, v in dotted.items()}))
    ctx: Any = Rank(run)
    ctx.config = config
    ctx.validates = validates
    ctx.total_steps = 3000
    ctx.world = SimpleNamespace(
        rank=0,
        size=1,
        local_size=1,
        is_main=True,
        any=int,
        cpu_group=None,
        device=torch.device("cpu"),
    )
    ctx.engine = SimpleNamespace(
        ds=None, settings=SimpleNamespace(bf16=False, zero_stage=1), before_step=None
    )
    ctx.model = SimpleNamespace(shape=shape, has_adapters=False)
    checkpoints = RunCheckpoints(ctx)
    return checkpoints, checkpoints._checkpointer


def run_steps(
    checkpoints: RunCheckpoints,
    first: int,
    last: int,
    before: Callable[[int], object] = lambda step: None,
    metrics: dict[str, float] | None = None,
    end: int | None = None,
) -> None:
    """End the steps ``first`` to ``last``; step ``end`` is the last of the run."""
    for step in range(first, last + 1):
        before(step)
        logged = {"train/nll": float(step)} if metrics is None else metrics
        checkpoints.after_step(step, logged, last=step == end, stop=None, sync=lambda: None)


def test_a_run_saves_every_save_freq_steps_and_at_the_end(tmp_path: Path, clock: Clock) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=3)
    run_steps(checkpoints, 1, 7, end=7)
    assert [(step, blocking) for step, _, blocking in checkpointer.saved] == [
        (3, False),
        (6, False),
        (7, True),
    ]


def test_a_run_saves_every_save_interval_minutes(tmp_path: Path, clock: Clock) -> None:
    """With steps of 70 s and two minutes, every second step is saved; a save by ``save_freq``
    restarts the interval.
    """
    checkpoints, checkpointer = make_checkpoints(
        tmp_path, checkpoint__save_freq=7, checkpoint__save_interval_minutes=2
    )
    run_steps(checkpoints, 1, 10, before=lambda step: setattr(clock, "now", clock.now + 70))
    assert checkpointer.steps == [2, 4, 6, 7, 9]


def test_by_default_a_run_saves_every_quarter_of_an_hour(tmp_path: Path, clock: Clock) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path)
    run_steps(checkpoints, 1, 40, before=lambda step: setattr(clock, "now", clock.now + 60))
    assert checkpointer.steps == [15, 30]


def test_failures_and_the_time_limit_shorten_the_interval(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Saves of 10 s, and of two attempts of half an hour one lost its node: an hour between
    failures, sqrt(2 * 10 * 3600) = 268 s.
    """
    lines: list[dict[str, Any]] = [
        {"cause": "node_failure", "start": 0, "end": 1800},
        {"cause": "preempted", "start": 0, "end": 1800},
        {"cause": "error", "start": 0, "end": 5},
        {"cause": "bad_node", "start": 0, "end": 5},
        {"cause": "done", "start": "?"},
    ]
    (tmp_path / "attempts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    checkpoints, checkpointer = make_checkpoints(tmp_path)
    checkpointer.save_s = 10.0
    run_steps(checkpoints, 1, 20, before=lambda step: setattr(clock, "now", clock.now + 30))
    assert checkpointer.steps == [9, 18]
    (tmp_path / "attempts.jsonl").unlink()
    monkeypatch.setenv("PLIMSOLL_SLURM", "1")
    monkeypatch.setenv("SLURM_JOB_END_TIME", str(int(clock.now) + 600))
    checkpoints, checkpointer = make_checkpoints(tmp_path)
    checkpointer.save_s = 10.0
    run_steps(checkpoints, 1, 12, before=lambda step: setattr(clock, "now", clock.now + 30))
    assert checkpointer.steps == [5, 10]


def test_a_save_after_a_skipped_step_is_marked_and_many_in_a_row_end_the_run(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, checkpointer = make_checkpoints(
        tmp_path, checkpoint__save_freq=1, max_skipped_steps=3
    )
    applied = {"actor/skipped_steps": 0.0, "actor/optimizer_steps": 2.0}
    partly = {"actor/skipped_steps": 1.0, "actor/optimizer_steps": 2.0}
    skipped = {
        "actor/skipped_steps": 2.0,
        "actor/optimizer_steps": 2.0,
        "critic/score/max": 1.0,
        "critic/advantages/max": math.nan,
    }
    for step, metrics in enumerate((applied, skipped, skipped, partly, skipped, skipped), 1):
        run_steps(checkpoints, step, step, metrics=metrics)
    assert checkpointer.healthy == [True, False, False, True, False, False]
    for step, healthy in enumerate(checkpointer.healthy, 1):
        save(Disk(), checkpointer.root, step, latest=False, healthy=healthy)
    with pytest.raises(UserError) as caught:
        run_steps(checkpoints, 7, 7, metrics=skipped)
    message = str(caught.value)
    assert (
        "Not finite in every training step since step 5: the advantage, the gradient norm"
        in message
    )
    assert "the reward," not in message and "optim.lr" in message and "grad_clip" in message
    # Step 4 was applied, and may be what spoilt the weights.
    assert "Saved before: step_4, step_1 (step_4, if saved, has the weights" in message
    assert f"trainer.resume_from_path={checkpointer.root / 'step_1'} " in message
    assert len(checkpointer.saved) == 6, "what changed nothing is not saved once more"


@pytest.mark.parametrize("limit", [0, None])
def test_skipped_steps_end_no_run_without_a_limit(
    tmp_path: Path, clock: Clock, limit: int | None
) -> None:
    checkpoints, _ = make_checkpoints(tmp_path, max_skipped_steps=limit)
    run_steps(
        checkpoints, 1, 50, metrics={"train/skipped_steps": 1.0, "train/optimizer_steps": 1.0}
    )


@pytest.mark.parametrize("stop", [None, "USR2"])
def test_the_last_save_waits_for_room(tmp_path: Path, clock: Clock, stop: str | None) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, grace_period_s=60)
    checkpointer.has_room = False
    checkpointer.last_failure = "checkpoint of step 6 failed: rank 0: No space left on device"
    checkpointer.room_at_try = 4
    checkpoints.after_step(6, {}, last=stop is None, stop=stop, sync=lambda: None)
    assert checkpointer.steps == [6]
    began = clock.now
    with pytest.raises(UserError, match=r"step 7 is not saved.*Free space"):
        checkpoints.after_step(7, {}, last=stop is None, stop=stop, sync=lambda: None)
    assert clock.now - began == pytest.approx(30 if stop else 300, abs=1)


def test_a_save_without_a_free_buffer_is_made_after_the_next_step(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=4)
    run_steps(checkpoints, 1, 6, before=lambda step: setattr(checkpointer, "has_room", step != 4))
    assert checkpointer.steps == [5]


def test_metrics_are_durable_before_the_save(tmp_path: Path, clock: Clock) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    checkpoints.after_step(
        1, {}, last=False, stop=None, sync=lambda: checkpointer.saved.append((-1, None, False))
    )
    assert checkpointer.steps == [-1, 1]


def test_a_stopped_run_saves_and_records_the_cause(tmp_path: Path, clock: Clock) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=-1)
    checkpoints.after_step(4, {}, last=False, stop="USR2", sync=lambda: None)
    assert checkpointer.saved == [(4, None, True)]
    end = read_records(tmp_path / "logs/attempt_1")[0].end
    assert end is not None
    assert (end.kind, end.stop, end.step, end.exit_code) == ("stopped", "USR2", 4, 85)
    checkpointer.has_room = False
    checkpointer.last_failure = "checkpoint of step 5 failed: the writer process died"
    with pytest.raises(Failure, match=r"step 5 is not saved: .*the writer process died"):
        checkpoints.after_step(5, {}, last=True, stop=None, sync=lambda: None)
    checkpointer.last_failure = (
        "checkpoint of step 5 failed: rank 0: Permission denied (step_5.tmp)"
    )
    with pytest.raises(
        UserError,
        match=r"step 5 is not saved: .*Permission denied.* Have the folder made writable",
    ):
        checkpoints.after_step(5, {}, last=True, stop=None, sync=lambda: None)
    checkpointer.last_failure = "checkpoint of step 6 failed: rank 1: No space left on device"
    with pytest.raises(
        UserError, match=r"step 6 is not saved: .*No space left on device.* Free space"
    ):
        checkpoints.after_step(6, {}, last=True, stop=None, sync=lambda: None)


def test_a_stopped_run_needs_no_engine_to_save(tmp_path: Path, clock: Clock) -> None:
    def fail() -> None:
        raise EngineFailed("gone")

    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    checkpoints._ctx.collector = SimpleNamespace(drain=fail)
    with pytest.raises(EngineFailed):
        checkpoints.after_step(1, {}, last=False, stop=None, sync=lambda: None)
    checkpoints.after_step(1, {}, last=False, stop="USR2", sync=lambda: None)
    assert checkpointer.steps == [1]


def test_wrong_input_in_the_middle_of_a_run_stays_a_user_error(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=-1)
    for step, text in (
        (0, "bad. No step was trained yet"),
        (4, "bad. Step 4 is saved; the same command goes on"),
    ):
        error = checkpoints.save_lost_run(step, AgreedError("bad"), sync=lambda: None)
        assert isinstance(error, UserError) and str(error).startswith(text)
    assert checkpointer.saved == [(4, None, True)]


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
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_margin=margin)
    checkpointer.save_s = 20.0
    clock.now += 10
    run_steps(checkpoints, 1, 1)
    clock.now = now
    assert checkpoints.stop_requested(None) == ("TIME" if stops else None)
    assert checkpoints.stop_requested("TERM") == "TERM"


def test_a_stop_saves_a_step_that_is_not_committed_and_no_other(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=-1)
    checkpointer.last_committed_step = 4
    synced: list[int] = []
    checkpoints.save_stopped(4, "USR2", {}, sync=lambda: synced.append(4))
    assert checkpointer.saved == []
    checkpoints.save_stopped(5, "USR2", {"val/reward": 0.5}, sync=lambda: synced.append(5))
    assert checkpointer.saved == [(5, 0.5, True)] and synced == [4, 5]
    checkpointer.has_room = False
    checkpointer.last_failure = "the disk is gone"
    with pytest.raises(Failure, match="step 6 is not saved: the disk is gone"):
        checkpoints.save_stopped(6, "USR2", {}, sync=lambda: None)


def test_the_grace_period_is_compared_with_the_measured_speed(tmp_path: Path, clock: Clock) -> None:
    checkpoints, _ = make_checkpoints(tmp_path, shape=LARGE, grace_period_s=120)
    assert any(
        "is taken to need" in note and "trainer.grace_period_s=120" in note
        for note in checkpoints.notes
    )
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 1, "time": 1, "ckpt/write_gbps": 50.0}\n{"step": 2, "time": 2}\n')
    checkpoints, _ = make_checkpoints(tmp_path, shape=LARGE, grace_period_s=120)
    assert not any("checkpoint" in note for note in checkpoints.notes)
    record.write_text('{"step": 1, "time": 1, "ckpt/write_gbps": 0.02}\n')
    checkpoints, _ = make_checkpoints(tmp_path, shape=LARGE, grace_period_s=120)
    assert any("at the 0.02 GB/s measured before" in note for note in checkpoints.notes)
    checkpoints, _ = make_checkpoints(tmp_path, shape=SHAPE, grace_period_s=120)
    assert checkpoints.notes == []


def test_the_best_checkpoint_by_default_has_the_highest_validation_reward(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    assert checkpointer.settings.best_metric == "val/reward"
    assert checkpointer.settings.best_mode == "max"
    run_steps(checkpoints, 1, 1, metrics={"val/reward": 0.25})
    run_steps(checkpoints, 2, 2)
    assert [metric for _, metric, _ in checkpointer.saved] == [0.25, None]
    assert checkpoints.best is None  # no such folder yet
    (checkpointer.root / "step_1").mkdir(parents=True)
    assert checkpoints.best == (checkpointer.root / "step_1", "val/reward 0.25")
    assert make_checkpoints(tmp_path, validates=False)[1].settings.best_metric is None


@pytest.mark.parametrize(
    ("save", "test", "hint"),
    [
        (100, 10, None),
        (100, 100, None),
        (-1, 10, None),
        (4000, 30, None),
        (100, -1, None),
        (100, 30, "only each 300th step"),
    ],
)
def test_saves_that_keep_best_cannot_rank_are_reported(
    tmp_path: Path, clock: Clock, save: int, test: int, hint: str | None
) -> None:
    checkpoints, _ = make_checkpoints(tmp_path, checkpoint__save_freq=save, test_freq=test)
    assert [hint in note for note in checkpoints.notes if hint] == ([True] if hint else [])
    assert hint or checkpoints.notes == []
    without_best, _ = make_checkpoints(
        tmp_path, checkpoint__save_freq=save, test_freq=test, checkpoint__keep_best=0
    )
    assert without_best.notes == []


def test_the_best_checkpoint_by_another_metric(tmp_path: Path, clock: Clock) -> None:
    checkpoints, checkpointer = make_checkpoints(
        tmp_path, checkpoint__save_freq=1, checkpoint__best_metric="train/nll", validates=False
    )
    assert checkpointer.settings.best_metric == "train/nll"
    assert checkpointer.settings.best_mode == "min"
    run_steps(checkpoints, 1, 2)
    assert [metric for _, metric, _ in checkpointer.saved] == [1.0, 2.0]


def test_an_unknown_best_metric_is_an_error_after_the_first_step(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, _ = make_checkpoints(
        tmp_path, checkpoint__best_metric="train/nil", checkpoint__best_mode="min"
    )
    with pytest.raises(
        UserError, match=r"best_metric=train/nil is no metric.*did you mean 'train/nll'.*val/reward"
    ):
        run_steps(checkpoints, 1, 1)
    # The first validation comes later.
    checkpoints, _ = make_checkpoints(tmp_path, checkpoint__best_metric="val/reward")
    run_steps(checkpoints, 1, 1)


def test_saved_state_is_restored(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    checkpoints._ctx.train()  # type: ignore[attr-defined]
    run_steps(checkpoints, 1, 1, metrics={"val/reward": 0.5})
    rank_state, global_state = checkpointer.states[0]
    assert checkpointer.about["wandb_id"] == "abc" and {"commit", "torch", "deepspeed"} < set(
        checkpointer.about
    )
    restored = SimpleNamespace(
        step=1,
        folder=checkpointer.root / "step_1",
        rank_state=rank_state,
        rank_states=[rank_state],
        global_state=global_state,
        manifest=SimpleNamespace(about=checkpointer.about),
    )
    monkeypatch.setattr(RecordingCheckpointer, "restored", restored)
    resumed, _ = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    assert (resumed.restored_step, resumed._ctx.samples_seen, resumed._best.value) == (1, 4, 0.5)
    assert resumed.notes == [f"Going on from {restored.folder} (step 1)"]
    record = tmp_path / "metrics.jsonl"
    record.write_text('{"step": 9, "ckpt/last_committed_step": 8.0}\n')
    resumed, _ = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    assert "step 8 was committed" in resumed.notes[1]
    record.unlink()
    del global_state["best"]
    restored.rank_state = None
    restored.rank_states = [rank_state, rank_state]
    resumed, _ = make_checkpoints(tmp_path, checkpoint__save_freq=1)
    assert "2 rank(s) wrote it, 1 go on: cost, python, numpy, torch begin anew" in resumed.notes
    assert "[WARNING] it was written by another version and lacks best" in resumed.notes


def test_goodput_is_part_of_every_steps_metrics(tmp_path: Path, clock: Clock) -> None:
    checkpoints, _ = make_checkpoints(tmp_path)
    assert {"ckpt/failures", "goodput/ettr", "goodput/attempts"} <= checkpoints.metrics().keys()
    with checkpoints:
        pass
    assert json.loads((tmp_path / "logs/attempt_1/clock.json").read_text())["number"] == 1


@pytest.mark.parametrize("missed_by_another", [False, True])
def test_a_rank_that_missed_the_commit_does_not_save_alone(
    tmp_path: Path, clock: Clock, missed_by_another: bool
) -> None:
    checkpoints, checkpointer = make_checkpoints(tmp_path)
    checkpointer.last_committed_step = 4
    checkpoints._ctx.world.any = lambda flag: max(flag, missed_by_another)  # type: ignore[misc,assignment]
    message = str(checkpoints.save_lost_run(4, Failure("3 restarts in a row"), sync=lambda: None))
    assert "Step 4 is saved" in message and checkpointer.steps == ([4] if missed_by_another else [])


def test_a_metric_that_only_rank_0_has_may_choose_the_best_checkpoint(
    tmp_path: Path, clock: Clock
) -> None:
    checkpoints, checkpointer = make_checkpoints(
        tmp_path,
        checkpoint__save_freq=1,
        checkpoint__best_metric="goodput/ettr",
        checkpoint__best_mode="max",
    )
    checkpoints._ctx.world.is_main = False  # type: ignore[misc]
    run_steps(checkpoints, 1, 1)
    checkpoints._ctx.world.is_main = True  # type: ignore[misc]
    with pytest.raises(UserError, match="goodput/ettr is no metric"):
        run_steps(checkpoints, 2, 2)
    run_steps(checkpoints, 3, 3, metrics={"goodput/ettr": 0.9})
    assert checkpointer.saved[-1] == (3, 0.9, False)
