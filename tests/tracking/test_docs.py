"""Every metric name is explained in docs/metrics.md."""

from __future__ import annotations

import torch

from tests.tracking.documented import DOC, undocumented
from trainer.base.metrics_file import TIMING_PREFIXES
from trainer.batching import plan
from trainer.tracking.console_text import HEADLINE
from trainer.tracking.perf import memory_metrics, micro_batch_metrics, throughput_metrics
from trainer.tracking.pictures import BUDGET, TRAIN_LOSS, TRAIN_REWARD, VAL_REWARD
from trainer.tracking.timers import Timers


def test_every_name_made_here_is_explained() -> None:
    timers = Timers()
    timers.add("update_actor", 1.0)
    keys = (
        set(timers.end_step())
        | set(throughput_metrics(1, 1.0, 1, flops=1.0, peak=1.0))
        | set(memory_metrics(torch.device("cpu")))
        | set(micro_batch_metrics([1], 2))
        | set(plan([3, 2, 2], 4, 1).metrics())
        | {BUDGET, *HEADLINE, *TRAIN_LOSS, *TRAIN_REWARD, *VAL_REWARD}
    )
    assert undocumented(keys) == set()


def test_an_unexplained_name_is_found() -> None:
    assert undocumented({"step", "time", "batch/fill_ratio", "batch/fill_ratios", "speed"}) == {
        "batch/fill_ratios",
        "speed",
    }


def test_the_page_says_what_a_resume_leaves_equal() -> None:
    for prefix in TIMING_PREFIXES:
        assert f"`{prefix}" in DOC.read_text()
