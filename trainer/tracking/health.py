"""Hints from a run's own metrics: once each, with the likely cause and the key to change."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trainer.config.schema.trainer import Watermarks
from trainer.tracking.learning_hints import LearningHints, LearningSettings


def generation_hint(mean_gen_s: float, marks: Watermarks) -> str | None:
    """A hint when generation takes long; ``mean_gen_s`` in seconds."""
    if mean_gen_s <= marks.gen_s:
        return None
    return (
        f"timing/gen is {mean_gen_s:.2f} s on average (watermark {marks.gen_s:g} s): rollout holds "
        "the step up. Raise actor_rollout_ref.rollout.max_num_seqs (with vllm also "
        "actor_rollout_ref.rollout.gpu_memory_utilization or max_num_batched_tokens), or lower "
        "data.max_response_length."
    )


def update_hint(std_update_s: float, marks: Watermarks) -> str | None:
    """A hint when updates take unequal times; ``std_update_s`` in seconds."""
    if std_update_s <= marks.update_actor_std_s:
        return None
    return (
        f"timing/update_actor varies by {std_update_s:.2f} s (watermark "
        f"{marks.update_actor_std_s:g} s): unequal loads per step. Turn on "
        "actor_rollout_ref.actor.use_dynamic_bsz, raise ppo_max_token_len_per_gpu, or set "
        "actor_rollout_ref.actor.dynamic_bsz_bucketing=True."
    )


def data_wait_hint(
    data_wait_s: float, step_s: float, num_workers: int | None, marks: Watermarks
) -> str | None:
    """A hint when the step waits for the data loader; times in seconds."""
    if step_s <= 0 or data_wait_s <= marks.data_wait_share * step_s:
        return None
    now = "" if num_workers is None else f" (now {num_workers})"
    return (
        f"timing/data_wait is {data_wait_s / step_s:.0%} of the step (watermark "
        f"{marks.data_wait_share:.0%}): the data loader is too slow. Raise data.num_workers{now} "
        "or data.prefetch_factor, or use a fast tokenizer."
    )


def workers_hint(num_workers: int, ranks_on_node: int, cores: int, marks: Watermarks) -> str | None:
    """A hint when there are more data-loader workers than the node has cores for."""
    workers = num_workers * ranks_on_node
    if workers <= marks.worker_share * cores:
        return None
    fitting = int(marks.worker_share * cores) // ranks_on_node
    return (
        f"data.num_workers={num_workers} on {ranks_on_node} rank(s) asks for {workers} workers on "
        f"{cores} cores (watermark {marks.worker_share:.0%}); one a core is started, which takes "
        f"time from the step. Set data.num_workers={fitting}."
    )


class Health:
    """Checks each step's metrics and gives each hint once a run: those on times after ``warmup``
    steps, those on learning after the steps of their window.
    """

    def __init__(
        self,
        marks: Watermarks,
        *,
        num_workers: int | None = None,
        warmup: int = 5,
        learning: LearningSettings | None = None,
    ) -> None:
        self._marks = marks
        self._num_workers = num_workers
        self._warmup = warmup
        self._learning = None if learning is None else LearningHints(learning)
        self._shown: set[str] = set()
        self._steps = 0

    def check(self, metrics: Mapping[str, Any]) -> list[str]:
        """New hints for this step."""
        if "timing/step" not in metrics:
            return []
        self._steps += 1
        hints: dict[str, str | None] = {}
        if self._learning is not None:
            hints |= self._learning.check(metrics)
        if self._steps > self._warmup:
            hints |= self._hints(metrics)
        new = []
        for kind, hint in hints.items():
            if hint is not None and kind not in self._shown:
                self._shown.add(kind)
                new.append(hint)
        return new

    def _hints(self, metrics: Mapping[str, Any]) -> dict[str, str | None]:
        def value(key: str) -> float:
            return float(metrics.get(key, 0.0))

        data_wait_s = value("timing/data_wait/mean") or value("timing/data_wait")
        step_s = value("timing/step/mean") or value("timing/step")
        return {
            "gen": generation_hint(value("timing/gen/mean"), self._marks),
            "update": update_hint(value("timing/update_actor/std"), self._marks),
            "data": data_wait_hint(data_wait_s, step_s, self._num_workers, self._marks),
        }
