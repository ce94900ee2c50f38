"""One of verl's example scripts trains three steps with only model, data and sizes changed."""

from __future__ import annotations

import json
from pathlib import Path

from tests.config.verl_scripts import command_line, read_scripts
from tests.e2e.runs import finish, rows
from tests.system.vllm_runs import NEEDS_VLLM

pytestmark = NEEDS_VLLM
SCRIPT = "examples/grpo_trainer/run_qwen3_4b_fsdp.sh"
SIZES = (
    "data.train_batch_size=4",
    "data.max_prompt_length=48",
    "data.max_response_length=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
    "actor_rollout_ref.rollout.gpu_memory_utilization=0.1",
    "trainer.n_gpus_per_node=1",
    "trainer.total_training_steps=3",
)


def row(first: int, second: int) -> dict[str, object]:
    """A sample as verl's preparation of GSM8K writes it."""
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"What is {first} + {second}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(first + second)},
    }


def test_a_script_of_verl_trains_with_its_settings(tmp_path: Path, shared: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("".join(json.dumps(row(n, n + 1)) + "\n" for n in range(1, 17)))
    scripts = read_scripts(shared / "data/verl_overrides.jsonl")
    (script,) = [one for one in scripts if one["script"] == SCRIPT]
    own = (
        f"data.train_files={data}",
        f"data.val_files={data}",
        "actor_rollout_ref.model.path=builtin:tiny",
    )
    # Of a key given twice the last one counts, as with "$@" at the end of the script.
    screen = finish(tmp_path / "run", *command_line(script), *own, *SIZES, WANDB_MODE="offline")
    assert "settings change nothing here" in screen
    records = rows(tmp_path / "run")
    steps = [record for record in records if "actor/grad_norm" in record]
    assert [record["training/global_step"] for record in steps] == [1, 2, 3]
    assert all(record["actor/kl_loss"] >= 0 for record in steps)  # use_kl_loss=True
