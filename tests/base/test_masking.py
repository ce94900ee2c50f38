"""What looks like a secret is masked, and nothing else."""

from __future__ import annotations

import pytest

from jobs.submit.cluster_config import Cluster, from_mapping
from jobs.submit.options import slurm_options
from trainer.base.errors import UserError
from trainer.base.masking import holds_secret, mask, mask_values

KEY = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    "text",
    [
        f"export WANDB_API_KEY={KEY}",
        f"hydra.launcher.setup=['export WANDB_API_KEY={KEY}', 'module load x']",
        f'export HF_TOKEN="{KEY}"; python x.py',
        f"--token={KEY}".upper().replace(KEY.upper(), KEY),
        f"s3://user:{KEY}@bucket/path",
        f"http://user:{KEY}@host:80/",
        f"Authorization: Bearer {KEY}",
        f"my_password: {KEY}",
        f"DB_PASSWORD='{KEY}'",
        f"hf_{KEY}",
        f"sk-{KEY}",
        f"ghp_{KEY}",
    ],
)
def test_secrets_are_masked(text: str) -> None:
    assert KEY not in mask(text) and "***" in mask(text) and holds_secret(text)
    assert mask(mask(text)) == mask(text)


@pytest.mark.parametrize(
    "text",
    [
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=4096",
        "tokenizer.pad_token=<pad>",
        "eos_token: </s>",
        "export HF_TOKEN=$HF_TOKEN",
        'export WANDB_API_KEY="$(cat ~/.key)"',
        "/data/token=3/x",
        "https://host:8080/path",
        "Qwen/Qwen2.5-0.5B-Instruct",
        "timing/step: 3 tokens: 4",
        "git@github.com:a/b",
    ],
)
def test_nothing_else_is(text: str) -> None:
    assert mask(text) == text and not holds_secret(text)


def test_values_of_a_config() -> None:
    config = {
        "a": {"hf_token": "x", "wandb_api_key": "y", "paths": ["s3://u:pw@h/x", 3]},
        "ppo_max_token_len_per_gpu": 1024,
        "password": "",
        "shown": ("export API_KEY=z",),
    }
    assert mask_values(config) == {
        "a": {"hf_token": "***", "wandb_api_key": "***", "paths": ["s3://u:***@h/x", 3]},
        "ppo_max_token_len_per_gpu": 1024,
        "password": "",
        "shown": ("export API_KEY=***",),
    }


def test_a_secret_for_a_script_is_refused_without_showing_it() -> None:
    line = f"export WANDB_API_KEY={KEY}"
    for refused in (
        lambda: slurm_options({"setup": [line]}),
        lambda: slurm_options({"additional_parameters": {"comment": line}}),
        lambda: from_mapping(Cluster, {"setup": [line]}),
    ):
        with pytest.raises(UserError, match="export the variable in the shell that submits") as e:
            refused()
        assert KEY not in str(e.value)
    slurm_options({"setup": ["export WANDB_API_KEY=$WANDB_API_KEY", "module load x"]})
