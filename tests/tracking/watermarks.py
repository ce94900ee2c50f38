"""Watermarks for tests; the run's own are in conf/."""

from __future__ import annotations

from trainer.config.schema.trainer import Watermarks


def watermarks(
    *,
    gen_s: float = 1.0,
    update_actor_std_s: float = 0.1,
    data_wait_share: float = 0.1,
    worker_share: float = 0.7,
    learning_steps: int = 10,
) -> Watermarks:
    return Watermarks(
        gen_s=gen_s,
        update_actor_std_s=update_actor_std_s,
        data_wait_share=data_wait_share,
        worker_share=worker_share,
        learning_steps=learning_steps,
    )
