"""The run folder's ``config.yaml``: what was checked is what runs, now and in every later
attempt.
"""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from trainer.base.errors import UserError
from trainer.config.checks.problems import raise_all
from trainer.config.keys import tree as keys
from trainer.config.keys.derived import with_followers
from trainer.config.loading import load
from trainer.config.schema import Config

FILE = "config.yaml"
HEADER = (
    "# The settings of this run. The same command continues it; elsewhere the same run starts anew "
    "with\n"
    "#   python -m trainer --config-path THIS_FOLDER --config-name config "
    "trainer.default_local_dir=OTHER_FOLDER\n"
    "# A key written ${...} follows another one until it is set itself.\n"
)
MAY_CHANGE = (
    "data.val_files",
    "data.val_batch_size",
    "data.val_max_samples",
    "data.num_workers",
    "data.prefetch_factor",
    "data.persistent_workers",
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu",
    "actor_rollout_ref.actor.dynamic_bsz_bucketing",
    "actor_rollout_ref.actor.bucket_boundaries",
    "actor_rollout_ref.actor.bucket_by",
    "actor_rollout_ref.actor.share_prompt",
    "actor_rollout_ref.model.enable_gradient_checkpointing",
    "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu",
    "actor_rollout_ref.rollout.max_num_batched_tokens",
    "actor_rollout_ref.rollout.gpu_memory_utilization",
    "actor_rollout_ref.rollout.max_num_seqs",
    "actor_rollout_ref.rollout.streaming",
    "actor_rollout_ref.rollout.timeout_s",
    "actor_rollout_ref.rollout.max_restarts",
    "actor_rollout_ref.rollout.nnodes",
    "actor_rollout_ref.rollout.server",
    "actor_rollout_ref.rollout.val_kwargs",
    "critic.ppo_max_token_len_per_gpu",
    "critic.forward_max_token_len_per_gpu",
    "reward_model.forward_max_token_len_per_gpu",
    "actor_rollout_ref.actor.zero_stage",
    "actor_rollout_ref.actor.param_offload",
    "actor_rollout_ref.actor.grad_offload",
    "actor_rollout_ref.actor.optimizer_offload",
    "trainer.default_hdfs_dir",
    "trainer.default_local_dir",
    "trainer.device",
    "trainer.n_gpus_per_node",
    "trainer.nnodes",
    "trainer.process_on_nodes",
    "trainer.logger",
    "trainer.log_val_generations",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.val_before_train",
    "trainer.val_only",
    "trainer.test_freq",
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.grace_period_s",
    "trainer.join_timeout_s",
    "trainer.export_hf",
    "trainer.enable_monitor",
    "trainer.monitor_interval",
    "trainer.plot_interval",
    "trainer.checkpoint",
    "trainer.watermarks",
)
"""Keys and groups of keys that a started run may change when it continues: they don't alter what is
learnt from a sample, or they say how long to go on.
"""


def run_dir_of(config: Config) -> Path:
    """Absolute path of the run folder."""
    return Path(os.path.abspath(os.path.expanduser(config.trainer.default_local_dir)))


def freeze(config: Config, run_dir: Path) -> Path:
    """Write ``<run_dir>/config.yaml`` (0600, in a 0700 folder, atomically) and return its path.

    When the run has started before, other values are taken only for the keys of ``MAY_CHANGE``.
    Raises UserError that names every other differing key with both values, or the folder that can't
    be written.
    """
    values = _with_absolute_paths(config.model_dump())
    values["trainer"]["default_local_dir"] = str(run_dir)
    path = run_dir / FILE
    try:
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists() and has_started(run_dir):
            raise_all(_differences(load_frozen(run_dir).model_dump(), values, run_dir))
        _write(
            path,
            HEADER + yaml.safe_dump(with_followers(values), sort_keys=False, allow_unicode=True),
        )
    except OSError as error:
        raise UserError(
            f"the run folder {run_dir} can't be written ({error.strerror or error}); set "
            "trainer.default_local_dir to a folder of yours with free space"
        ) from error
    return path


def load_frozen(run_dir: Path) -> Config:
    """The checked settings of a run folder. Keys that are newer than the file get their
    defaults.
    """
    path = run_dir / FILE
    try:
        raw = OmegaConf.load(path)  # its reader knows 1e-6 as a number
    except OSError as error:
        why = error.strerror or "it holds no settings"
        raise UserError(f"{path} can't be read ({why}); give the folder of a run") from error
    except yaml.YAMLError as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    if not isinstance(raw, DictConfig):
        raise UserError(f"{path} holds no settings")
    return load(raw)


def has_started(run_dir: Path) -> bool:
    """Whether anything was trained in ``run_dir``: then its settings bind."""
    metrics = run_dir / "metrics.jsonl"
    steps = (
        folder for root in (run_dir, run_dir / "checkpoints") for folder in root.glob("step_*")
    )
    return (metrics.is_file() and metrics.stat().st_size > 0) or any(steps)


def _differences(old: dict[str, Any], new: dict[str, Any], run_dir: Path) -> list[str]:
    before, now = dict(keys.leaves(old)), dict(keys.leaves(new))
    return [
        f"{key}={keys.written(value)}, but the run in {run_dir} was started with "
        f"{keys.written(before.get(key))}: "
        f"type {key}={keys.written(before.get(key))} to continue it, or set another "
        "trainer.experiment_name"
        for key, value in now.items()
        if before.get(key) != value
        and not any(key == name or key.startswith(f"{name}.") for name in MAY_CHANGE)
    ]


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Paths that exist here, made absolute, so that the run repeats from any folder."""
    for group, name in (
        (values["data"], "train_files"),
        (values["data"], "val_files"),
        (values["actor_rollout_ref"]["model"], "path"),
        (values["custom_reward_function"], "path"),
        (values["trainer"], "resume_from_path"),
    ):
        old = group[name]
        group[name] = [_absolute(item) for item in old] if isinstance(old, list) else _absolute(old)
    return values


def _absolute(text: str | None) -> str | None:
    if text is None or "://" in text:
        return text
    folder = os.path.expanduser(text.split("*", 1)[0])
    return (
        os.path.abspath(os.path.expanduser(text))
        if os.path.exists(os.path.dirname(folder) or folder)
        else text
    )


def _write(path: Path, text: str) -> None:
    """Replace ``path`` in one step; it is whole and durable, or as before."""
    handle, temp = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            os.fchmod(file.fileno(), stat.S_IRUSR | stat.S_IWUSR)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temp, path)
    except BaseException:
        os.unlink(temp)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
