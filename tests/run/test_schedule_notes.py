"""What a resumed run with another number of steps says of its learning rate."""

from __future__ import annotations

from functools import partial
from typing import Any

from trainer.algorithms.learning_rate import learning_rate
from trainer.config.schema.actor import Optim
from trainer.run.schedule_notes import schedule_notes


def notes(before: int | None, now: int, **changed: Any) -> str:
    values = {
        "lr_scheduler_type": "cosine",
        "lr_warmup_steps": 0,
        "lr_warmup_steps_ratio": 0.0,
        "total_training_steps": None,
    }
    optim = Optim.model_construct(**(values | changed))
    schedule = partial(
        learning_rate,
        lr=1e-3,
        kind=optim.lr_scheduler_type,
        warmup_steps=0,
        total_steps=optim.total_training_steps or now,
    )
    return "\n".join(
        schedule_notes(
            optim, step=before or 5, before=before, now=now, rate=lambda s: schedule(s - 1)
        )
    )


def test_an_unchanged_run_and_an_old_checkpoint_say_nothing() -> None:
    assert notes(100, 100) == "" and notes(None, 100) == ""


def test_an_extended_run_says_what_its_schedule_does() -> None:
    text = notes(100, 200)
    assert "200 steps, not 100 as until step 100: the cosine schedule" in text
    assert "0.0005 at step 101" in text and "at step 200" in text
    assert notes(100, 200, lr_scheduler_type="constant").endswith("the learning rate stays 0.001.")


def test_steps_beyond_a_fixed_schedule_are_told_to_train_nothing() -> None:
    text = notes(100, 200, total_training_steps=100)
    assert text.startswith("[WARNING] ") and "0 at step 101, 0 at step 200" in text
    assert "train nothing" in text and "optim.min_lr_ratio" in text
    fixed = notes(100, 200, total_training_steps=400)
    assert "optim.total_training_steps=400" in fixed and "WARNING" not in fixed
