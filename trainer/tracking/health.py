"""Watermarks on a run's own timings: one hint, once, naming the likely cause and the key to
turn.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Watermarks:
    """Where a hint begins."""

    gen_s: float = 1.0
    """Mean ``timing/gen`` over the window, seconds."""
    update_actor_std_s: float = 0.1
    """Standard deviation of ``timing/update_actor`` over the window, seconds."""
    data_wait_share: float = 0.10
    """``timing/data_wait`` as a share of ``timing/step``."""
    worker_share: float = 0.70
    """Data-loader workers as a share of the cores."""


def generation_hint(mean_gen_s: float, marks: Watermarks) -> str | None:
    """Generation takes long."""
    if mean_gen_s <= marks.gen_s:
        return None
    return (
        f"timing/gen is {mean_gen_s:.2f} s on average (watermark {marks.gen_s:g} s): rollout holds "
        "the step up. Raise "
        "actor_rollout_ref.rollout.max_num_seqs (with vllm also "
        "actor_rollout_ref.rollout.gpu_memory_utilization or "
        "max_num_batched_tokens), or lower data.max_response_length."
    )


def update_hint(std_update_s: float, marks: Watermarks) -> str | None:
    """Updates take unequal times."""
    if std_update_s <= marks.update_actor_std_s:
        return None
    return (
        f"timing/update_actor varies by {std_update_s:.2f} s (watermark "
        f"{marks.update_actor_std_s:g} s): unequal loads "
        "per step. Turn on actor_rollout_ref.actor.use_dynamic_bsz, raise "
        "ppo_max_token_len_per_gpu, or set "
        "actor_rollout_ref.actor.dynamic_bsz_bucketing=True."
    )


def data_wait_hint(
    data_wait_s: float, step_s: float, num_workers: int | None, marks: Watermarks
) -> str | None:
    """The step waits for the data loader."""
    if step_s <= 0 or data_wait_s <= marks.data_wait_share * step_s:
        return None
    now = "" if num_workers is None else f" (now {num_workers})"
    return (
        f"timing/data_wait is {data_wait_s / step_s:.0%} of the step (watermark "
        f"{marks.data_wait_share:.0%}): the data "
        f"loader is too slow. Raise data.num_workers{now} or data.prefetch_factor, or use a fast "
        "tokenizer."
    )


def workers_hint(num_workers: int, ranks_on_node: int, cores: int, marks: Watermarks) -> str | None:
    """More data-loader workers than the node can feed."""
    workers = num_workers * ranks_on_node
    if workers <= marks.worker_share * cores:
        return None
    fitting = int(marks.worker_share * cores) // ranks_on_node
    return (
        f"data.num_workers={num_workers} on {ranks_on_node} rank(s) asks for {workers} workers on "
        f"{cores} cores "
        f"(watermark {marks.worker_share:.0%}); one a core is started, which takes time from the "
        "step. "
        f"Set data.num_workers={fitting}."
    )


class Health:
    """Looks at each step's metrics and gives each hint once a run, after ``warmup`` steps."""

    def __init__(
        self, marks: Watermarks, *, num_workers: int | None = None, warmup: int = 5
    ) -> None:
        self._marks = marks
        self._num_workers = num_workers
        self._warmup = warmup
        self._given: set[str] = set()
        self._steps = 0

    def check(self, metrics: Mapping[str, Any]) -> list[str]:
        """New hints for this step."""
        if "timing/step" not in metrics:
            return []
        self._steps += 1
        if self._steps <= self._warmup:
            return []

        def value(key: str) -> float:
            return float(metrics.get(key, 0.0))

        wait = value("timing/data_wait/mean") or value("timing/data_wait")
        step = value("timing/step/mean") or value("timing/step")
        hints = {
            "gen": generation_hint(value("timing/gen/mean"), self._marks),
            "update": update_hint(value("timing/update_actor/std"), self._marks),
            "data": data_wait_hint(wait, step, self._num_workers, self._marks),
        }
        new = {
            kind: text
            for kind, text in hints.items()
            if text is not None and kind not in self._given
        }
        self._given |= set(new)
        return list(new.values())
