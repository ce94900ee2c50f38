"""``trainer.*``: the run, its machines, its checkpoints and its logs."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator

from trainer.config.schema.base import (
    Count,
    Factor,
    Interval,
    NonNegative,
    OpenShare,
    Positive,
    Section,
    Seed,
    Share,
    Text,
    Whole,
)
from trainer.config.schema.critic import NO_CRITIC
from trainer.config.schema.markers import LOCAL_PATH, MAY_CHANGE, RL_ONLY, NoEffect


def _resume_mode(value: object) -> object:
    """``resume_path`` is verl's value for ``path``."""
    return "path" if value == "resume_path" else value


def _no_steps(value: object) -> object:
    """verl's default, an empty list, is no step."""
    return None if value == [] else value


def default_best_mode(metric: str) -> Literal["max", "min"] | None:
    """Whether more or less of ``metric`` is better, judged by its name; None when the name does not
    tell.
    """
    if any(word in metric for word in ("reward", "score")):
        return "max"
    if any(word in metric for word in ("loss", "nll")):
        return "min"
    return None


SYNCHRONOUS_SAVE = NoEffect(
    "trainer.checkpoint.async_save",
    (False,),
    "saves while training waits, as fast as it goes: set it to true",
    refused=True,
)
KEEPS_NO_BEST = NoEffect(
    "trainer.checkpoint.keep_best", (0,), "keeps no best one: set it to 1 or more", refused=True
)


class Checkpoint(Section):
    """``trainer.checkpoint``."""

    save_freq: Interval
    """Save each so many steps. -1 or 0: not by steps."""
    save_interval_minutes: Positive | Literal["auto"] | None
    """Save as well when so many minutes have passed since the last one. auto: 15, less where the
    job's time limit or earlier failures of the run ask for it. null: not by time.
    """
    async_save: bool
    """Write in the background; training waits for the copy to host memory only."""
    write_share: Annotated[OpenShare, SYNCHRONOUS_SAVE]
    """Share of the disk's speed at which a save is written while training goes on. 1: as fast as it
    goes.
    """
    atomic_save: bool
    """Publish a checkpoint by one rename after all of it is on disk. Only true is supported."""
    keep_last: Count
    """Newest checkpoints kept."""
    keep_every: Count | None
    """Keep each step that is a multiple of this for good. null: none."""
    keep_best: Whole
    """Of the checkpoints saved, so many with the best ``best_metric`` are kept beside the
    newest.
    """
    best_metric: Annotated[Text | None, KEEPS_NO_BEST]
    """Metric that ``keep_best`` goes by. null: ``val/reward``, where there is a validation."""
    best_mode: Literal["max", "min"] | None
    """Whether more or less of it is better. null: max for a reward or score, min for a loss."""
    save_margin: Factor
    """Predicted save time times this must fit into ``trainer.grace_period_s``."""


NO_ROLLBACK = NoEffect(
    "trainer.rollback.enable", (False,), "never rolls back: set it to true", refused=True
)


class Rollback(Section):
    """``trainer.rollback``: back to the best checkpoint when ``trainer.checkpoint.best_metric``
    falls.
    """

    enable: bool
    """Load the weights and optimizer of the best checkpoint when the metric stays below its best.
    The run goes on with the next step and the next prompts.
    """
    patience: Annotated[Count, NO_ROLLBACK]
    """After so many values in a row that are worse than the best."""
    min_delta: Annotated[NonNegative, NO_ROLLBACK]
    """Worse than the best by more than this, in the metric's unit, counts as a fall."""
    max_rollbacks: Annotated[Whole, NO_ROLLBACK]
    """Rollbacks of a run, all attempts together; when it falls once more it ends."""


NO_PROFILE = NoEffect(
    "trainer.profiler.steps",
    (None,),
    "profiles no step: set it to a list of steps, such as [5]",
)
MEMORY_ONLY = NoEffect(
    "trainer.profiler.tool", ("torch_memory",), "records the GPU's memory alone", refused=True
)


class Profiler(Section):
    """``trainer.profiler``: what happens inside chosen steps. docs/profiling.md shows how to
    read it.
    """

    steps: Annotated[list[Count] | None, BeforeValidator(_no_steps)]
    """Training steps to profile; each writes the phases of all ranks as one trace. null or []:
    none.
    """
    tool: Annotated[Literal["torch", "torch_memory"], NO_PROFILE]
    """What ``ranks`` record besides: torch, PyTorch's profiler; torch_memory, every allocation on
    the GPU.
    """
    ranks: Annotated[list[Whole], NO_PROFILE]
    """Ranks that record with ``tool``."""
    all_ranks: Annotated[bool, NO_PROFILE]
    """All ranks do."""
    contents: Annotated[
        list[Literal["cpu", "cuda", "memory", "shapes", "stack"]], NO_PROFILE, MEMORY_ONLY
    ]
    """What PyTorch's profiler records."""
    save_path: Annotated[Text | None, NO_PROFILE]
    """Folder for the traces. null: ``profile`` in the run folder."""


class Watermarks(Section):
    """``trainer.watermarks``: where a hint begins."""

    gen_s: Positive
    """Mean of ``timing/gen``, seconds."""
    update_actor_std_s: Positive
    """Standard deviation of ``timing/update_actor``, seconds."""
    data_wait_share: Share
    """Data wait as a share of the step."""
    worker_share: Share
    """Loader processes of a machine as a share of its cores."""
    learning_steps: Whole
    """Steps in a row that have to look as if nothing were learnt (docs/metrics.md). 0: no such
    hints.
    """


LoggerName = Literal["console", "wandb", "tensorboard", "mlflow", "swanlab", "trackio"]


class Trainer(Section):
    """``trainer``."""

    mode: Literal["sft", "rl"]
    """Supervised fine-tuning, or reinforcement learning."""
    project_name: Text
    """Project in W&B; first folder under ``runs``."""
    experiment_name: Text
    """Name of the run in W&B; second folder under ``runs``."""
    default_local_dir: Annotated[Text, MAY_CHANGE]
    """Run folder: config, metrics, checkpoints, logs. The same folder continues the run."""
    default_hdfs_dir: Annotated[Text | None, MAY_CHANGE]
    """Where checkpoints are mirrored: any fsspec URL (s3://, hdfs://, file://), with or without a
    slash at its end.
    """
    logger: Annotated[LoggerName | list[LoggerName], MAY_CHANGE]
    """Where metrics go besides ``metrics.jsonl``; docs/loggers.md has the settings of each."""
    log_val_generations: Annotated[Whole, MAY_CHANGE]
    """Validation answers logged as text each time."""
    rollout_data_dir: Annotated[Text | None, MAY_CHANGE, RL_ONLY]
    """Folder for the responses of training with their rewards: ``STEP.jsonl``. null: none."""
    validation_data_dir: Annotated[Text | None, MAY_CHANGE]
    """Folder for the responses of each validation with their rewards: ``STEP.jsonl``. null:
    none.
    """
    seed: Seed
    """Seed of everything random."""
    device: Annotated[Literal["auto", "cpu", "cuda"], MAY_CHANGE]
    """auto: CUDA where there is a GPU."""
    nnodes: Annotated[Count, MAY_CHANGE]
    """Machines."""
    n_gpus_per_node: Annotated[Count, MAY_CHANGE]
    """Ranks (one per GPU, or CPU processes) of each machine."""
    process_on_nodes: Annotated[list[Count] | None, MAY_CHANGE]
    """Ranks of each machine, one number per machine. null: ``n_gpus_per_node`` on each."""
    total_epochs: Annotated[Count, MAY_CHANGE]
    """Passes over the training data, where ``total_training_steps`` is null."""
    total_training_steps: Annotated[Count | None, MAY_CHANGE]
    """Iterations of the run, over as many epochs as they take. null: by ``total_epochs``."""
    critic_warmup: Annotated[Whole, NO_CRITIC]
    """Iterations at the start that train the critic alone (gae)."""
    val_before_train: Annotated[bool, MAY_CHANGE]
    """Validate before the first step, when there is something to validate on."""
    val_only: Annotated[bool, MAY_CHANGE]
    """Validate (the run's checkpoint where there is one) and stop."""
    test_freq: Annotated[Interval, MAY_CHANGE]
    """Validate each so many steps. -1 or 0: only before and after training."""
    resume_mode: Annotated[
        Literal["auto", "disable", "path"], BeforeValidator(_resume_mode), MAY_CHANGE
    ]
    """auto: continue from the newest checkpoint of the run folder; path: from
    ``resume_from_path``.
    """
    resume_from_path: Annotated[Text | None, LOCAL_PATH, MAY_CHANGE]
    """Checkpoint folder ``step_N`` to continue from."""
    accept_changed_files: Annotated[bool, MAY_CHANGE]
    """Go on with a reward's, an agent's or a template's file that differs from the copy that the
    run was started with, and keep a copy of the new one; also with other validation data. false:
    such a difference is an error.
    """
    max_skipped_steps: Annotated[Whole | None, MAY_CHANGE]
    """Training steps in a row whose gradients are not finite, so that they change nothing, before
    the run ends. 0 or null: it never does.
    """
    grace_period_s: Annotated[NonNegative, MAY_CHANGE]
    """Seconds between the warning signal and the kill: one update and a save have to fit."""
    join_timeout_s: Annotated[Positive, MAY_CHANGE]
    """How long ranks wait for each other at the start, s; those that don't come are named."""
    export_hf: Annotated[bool, MAY_CHANGE]
    """Write the trained model as a Hugging Face folder at the end."""
    enable_monitor: Annotated[bool, MAY_CHANGE]
    """Draw pictures of the load into the run folder."""
    monitor_interval: Annotated[Count, MAY_CHANGE]
    """Steps between two DynamicBatchMonitor lines."""
    plot_interval: Annotated[Count, MAY_CHANGE]
    """Steps between two sets of pictures of ``enable_monitor``."""
    checkpoint: Annotated[Checkpoint, MAY_CHANGE]
    rollback: Annotated[Rollback, MAY_CHANGE]
    profiler: Annotated[Profiler, MAY_CHANGE]
    watermarks: Annotated[Watermarks, MAY_CHANGE]
