"""Wrong input ends a run with exit code 2 and one message, without a traceback or lost work."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.e2e.runs import SFT, kill, metrics, start, wait_for_exit
from trainer.models import load_model

ROOT = Path(__file__).parents[2]
REWARD = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    "
FILES = {
    "ok.jsonl": '{"question": "1+1?", "answer": "#### 2"}\n',
    "empty.jsonl": '{"question": "1+1?", "answer": "#### 2"}\n{"question": "", "answer": "#### '
    '2"}\n',
    "raises.py": REWARD + "raise ValueError('b')\n",
    "nan.py": REWARD + "return float('nan')\n",
    "model/config.json": '{"model_type": "llama"}',
    "a_file": "",
}
CUSTOM_DATA = [
    "data.task=null",
    "data.prompt_key=question",
    "data.train_batch_size=1",
    "data.shuffle=false",
    "actor_rollout_ref.actor.ppo_mini_batch_size=1",
    "data.num_workers=0",
]
CASES = {
    "missing file": (["data.task=null", "data.train_files=@/no.jsonl"], "there is no file"),
    "wrong field": (
        ["data.task=null", "data.train_files=@/ok.jsonl", "data.prompt_key=q"],
        "Found: question, answer",
    ),
    "empty prompt": ([*CUSTOM_DATA, "data.train_files=@/empty.jsonl"], "row 2"),
    "over the budget": (["actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32"], "=72 or more"),
    "do not divide": (["actor_rollout_ref.actor.ppo_mini_batch_size=5"], "nearest valid"),
    "unknown key": (["actor_rollout_ref.actor.ppo_max_tokn_len_per_gpu=512"], "did you mean"),
    "deprecated batch size": (
        ["actor_rollout_ref.actor.ppo_micro_batch_size=4"],
        "ppo_micro_batch_size_per_gpu",
    ),
    "no weights": (["actor_rollout_ref.model.path=@/model"], "has no weights"),
    "reward raises": (
        ["custom_reward_function.path=@/raises.py"],
        "raised ValueError: b (raises.py:2)",
    ),
    "reward is NaN": (["custom_reward_function.path=@/nan.py"], "not a finite number"),
    "no folder there": (["trainer.default_local_dir=@/a_file/run"], "a_file"),
}


def trainer(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Run one step of GRPO in ``folder``, unless ``overrides`` set another folder or more steps."""
    settings = [
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.logger=[console]",
    ]
    if not any("total_training_steps" in override for override in overrides):
        settings.append("trainer.total_training_steps=1")
    if not any(override.startswith("trainer.default_local_dir") for override in overrides):
        settings.append(f"trainer.default_local_dir={folder / 'run'}")
    command = [
        sys.executable,
        "-m",
        "trainer",
        "experiment=demo_grpo",
        *settings,
        *overrides,
    ]
    environment = {k: v for k, v in os.environ.items() if k != "HYDRA_FULL_ERROR"}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.mark.parametrize("name", CASES)
def test_wrong_input_is_one_message(tmp_path: Path, name: str) -> None:
    for file, text in FILES.items():
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(text)
    overrides, expected = CASES[name]
    done = trainer(tmp_path, *[o.replace("@", str(tmp_path)) for o in overrides])
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    errors = [
        line for line in (done.stdout + done.stderr).splitlines() if line.startswith("Error:")
    ]
    assert len(errors) == 1 and expected in errors[0]


def test_a_token_beyond_the_vocabulary_is_one_message(tmp_path: Path) -> None:
    """The tokenizer has an added token, the model was not resized."""
    tiny = load_model("builtin:tiny", dtype=torch.float32, device="cpu")
    tiny.tokenizer.add_tokens(["<far>"])
    tiny.model.save_pretrained(tmp_path / "model")  # type: ignore[operator]
    tiny.tokenizer.save_pretrained(tmp_path / "model")
    (tmp_path / "far.jsonl").write_text('{"question": "1+1<far>?", "answer": "#### 2"}\n')
    overrides = [
        f"actor_rollout_ref.model.path={tmp_path / 'model'}",
        f"data.train_files={tmp_path / 'far.jsonl'}",
    ]
    done = trainer(tmp_path, *CUSTOM_DATA, *overrides, "data.max_prompt_length=64")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    assert (
        "has 513 tokens, more than the model's vocabulary of 512" in done.stderr
        and "resize" in done.stderr
    )


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    if os.geteuid() != 0:
        pytest.skip("mounting a small disk needs root")
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", folder], check=True, timeout=200
    )
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True, timeout=200)


def test_a_full_disk_costs_no_work(small_disk: Path) -> None:
    """The last checkpoint does not fit: the run says so, waits, and ends well with more space."""
    run = small_disk / "run"
    process = start(run, *SFT, "trainer.total_training_steps=2")
    try:
        assert process.stdout is not None
        screen = ""
        for line in process.stdout:  # ends with the process, which waits for five minutes at most
            screen += line
            if "is tried again" in line:
                break
        assert "No space left on device" in screen and process.poll() is None, screen
        subprocess.run(["mount", "-o", "remount,size=200m", small_disk], check=True, timeout=200)
        code, rest = wait_for_exit(process)
    finally:
        kill(process)
    assert code == 0 and "Done: 2 steps" in rest, screen + rest
    assert "Traceback" not in screen + rest
    assert sorted(metrics(run)) == [1, 2]
    assert (run / "checkpoints" / "step_2").is_dir()


def test_a_rank_that_fails_later_loses_no_step_and_its_error_is_the_last_line(
    tmp_path: Path,
) -> None:
    """One of two ranks fails in the second step: both save the first step and end."""
    count = "import os\nN = 0\n" + REWARD + "global N\n    N += 1\n"
    (tmp_path / "one.py").write_text(
        count + "    return 1 / (os.environ['RANK'] == '0' or N <= 8)\n"
    )
    overrides = [
        "trainer.n_gpus_per_node=2",
        "trainer.total_training_steps=3",
        "data.num_workers=1",
        "data.train_batch_size=8",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        "actor_rollout_ref.rollout.n=2",
    ]
    done = trainer(tmp_path, f"custom_reward_function.path={tmp_path / 'one.py'}", *overrides)
    assert done.returncode == 2, done.stdout + done.stderr
    last = (done.stdout + done.stderr).rstrip().splitlines()[-1]
    assert "raised ZeroDivisionError" in last and "one.py:6" in last
    assert "Step 1 is saved; the same command goes on" in last
    assert (tmp_path / "run" / "checkpoints" / "step_1").is_dir()
    assert sorted(metrics(tmp_path / "run")) == [1]
