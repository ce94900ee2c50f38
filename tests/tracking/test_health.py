"""Hints come above their watermark, once, and name a key."""

from __future__ import annotations

import pytest

from tests.tracking.watermarks import watermarks
from trainer.tracking.health import (
    Health,
    data_wait_hint,
    generation_hint,
    update_hint,
    workers_hint,
)

MARKS = watermarks()


def test_each_hint_begins_above_its_watermark_and_names_a_key() -> None:
    assert generation_hint(1.0, MARKS) is None and update_hint(0.1, MARKS) is None
    assert data_wait_hint(0.1, 1.0, 8, MARKS) is None and data_wait_hint(1.0, 0.0, 8, MARKS) is None
    hint = generation_hint(1.01, MARKS) or ""
    assert (
        "rollout.max_num_seqs (with vllm also actor_rollout_ref.rollout.gpu_memory_utilization"
        in hint
    )
    assert "use_dynamic_bsz" in (update_hint(0.11, MARKS) or "")
    assert "25% of the step" in (data_wait_hint(0.25, 1.0, 8, MARKS) or "")


@pytest.mark.parametrize(
    ("workers", "ranks", "cores", "fitting"), [(8, 1, 8, 5), (2, 2, 4, 1), (1, 1, 1, 0)]
)
def test_too_many_workers_are_told_how_many_fit(
    workers: int, ranks: int, cores: int, fitting: int
) -> None:
    assert f"Set data.num_workers={fitting}." in (workers_hint(workers, ranks, cores, MARKS) or "")
    assert workers_hint(fitting, ranks, cores, MARKS) is None


def test_warm_up_gives_no_hint_and_a_lasting_cause_gives_one() -> None:
    health = Health(watermarks(gen_s=0.5), warmup=2)
    slow = {"timing/step": 2.0, "timing/gen/mean": 0.6}
    assert [len(health.check(slow)) for _ in range(5)] == [0, 0, 1, 0, 0]
    assert health.check({"val/reward": 1.0}) == []
