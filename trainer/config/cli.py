"""The text of ``--help``, and errors printed as one message."""

from __future__ import annotations

import sys
import textwrap

from trainer.base.command import report
from trainer.base.errors import UserError
from trainer.config.checks.problems import with_key
from trainer.config.keys.conf_tree import conf_dir, config_groups

HELP = """\
Plimsoll: reinforcement-learning post-training of language models.
Micro-batches are filled up to a token budget per GPU, never over it.

  python -m trainer [KEY=VALUE ...]        one run on this machine
  python -m trainer -m KEY=A,B ...         a sweep on Slurm
  python -m trainer.plan [KEY=VALUE ...]   what a run would need, beforehand
  python -m jobs --help                    what runs, how it goes, which one won

Examples
  python -m trainer experiment=demo_grpo
  python -m trainer experiment=demo_sft trainer.n_gpus_per_node=2
  python -m trainer experiment=gsm8k \\
      data.train_files=train.jsonl data.val_files=test.jsonl
  python -m trainer -m experiment=demo_grpo \\
      actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096,8192
  python -m trainer -m experiment=demo_grpo \\
      actor_rollout_ref.actor.dynamic_bsz_bucketing=true \\
      'actor_rollout_ref.actor.bucket_boundaries=[64,256],[64,256,1024]'
  python -m trainer --config-path RUN_FOLDER --config-name config \\
      trainer.default_local_dir=OTHER      # repeat a run

Groups of settings (GROUP=NAME)
{groups}

Keys most used (docs/config.md has all; verl's names)
  trainer.mode
      sft or rl
  data.train_files, data.val_files, data.task
      what to learn from: files, or a built-in task
  data.train_batch_size
      prompts or samples of an iteration
  actor_rollout_ref.model.path
      folder, hub id, builtin:tiny or builtin:smollm2
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu
      token budget: most tokens of a micro-batch of a rank
  actor_rollout_ref.actor.ppo_mini_batch_size
      prompts or samples of an optimizer step
  actor_rollout_ref.actor.optim.lr
      learning rate
  actor_rollout_ref.rollout.n
      responses of a prompt
  algorithm.adv_estimator
      estimator of the advantages
  trainer.n_gpus_per_node, trainer.nnodes
      ranks
  trainer.total_training_steps
      length of the run
  trainer.default_local_dir
      run folder; the same command continues the run in it

Options
  --help                    this text
  --cfg job --resolve       show the settings and stop
  -m, --multirun            sweep
  --config-path, --config-name, --config-dir   settings from elsewhere
  --hydra-help              options of Hydra

Exit codes
  0    finished
  2    wrong input (one message says what to type)
  85   saved and wants to go on
  77   unfit node
  130  interrupted
  1    something no check foresaw (a file has the traceback)
HYDRA_FULL_ERROR=1 shows tracebacks.
"""
WIDTH = 80
"""Characters of a line of ``--help``: a terminal's."""


def help_text() -> str:
    """The text of ``--help``. Reads the names of the groups from ``conf``; imports neither Hydra
    nor torch.
    """
    groups = sorted(config_groups([conf_dir()]).items())
    rows = [
        textwrap.fill(f"  {group:<12}{', '.join(names)}", width=WIDTH, subsequent_indent=" " * 14)
        for group, names in groups
        if not group.startswith("hydra/")
    ]
    return HELP.format(groups="\n".join(rows))


def print_error(error: UserError) -> int:
    """Print ``error`` as one message, with ``HYDRA_FULL_ERROR=1`` after its traceback. Returns the
    exit code.
    """
    sys.stdout.flush()
    return report(error)


def message_of(error: BaseException) -> str:
    """What Hydra, OmegaConf or YAML says of settings that it can't compose, with the cause."""
    if isinstance(error, UserError):
        return str(error)
    if isinstance(error, RecursionError):
        return "the settings refer to each other in a circle, or are nested too deeply"
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if error.__cause__ is not None:
        lines += str(error.__cause__).splitlines()[:1]
    if not any("full_key" in line for line in lines):
        lines[:1] = [with_key(error)]
    if not lines:
        return f"the settings can't be composed ({type(error).__name__})"
    return "; ".join(dict.fromkeys(lines))
