"""A folder that is no checkpoint is recognized, and the message says what to type instead."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.checkpoint.test_power_cut import save
from tests.ranks.worlds import single_rank
from trainer.base.errors import UserError
from trainer.checkpoint import resume
from trainer.checkpoint.settings import CheckpointSettings
from trainer.checkpoint.store import layout
from trainer.checkpoint.store.disk import Disk


def refusal(path: Path) -> str:
    settings = CheckpointSettings(resume_mode="path", resume_from_path=str(path))
    with pytest.raises(UserError) as caught:
        resume.find_checkpoint(Disk(), path.parent / "run", settings, single_rank())
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["config.json", "model.safetensors"], "set actor_rollout_ref.model.path to it"),
        (
            ["latest", "global_step7/mp_rank_00_model_states.pt"],
            "it is DeepSpeed's, without our manifest.json",
        ),
        (["mp_rank_00_model_states.pt"], "it is DeepSpeed's"),
        (["latest_checkpointed_iteration.txt"], "it is a checkpoint of verl"),
        (["global_step_20/actor/model.pt"], "it is a checkpoint of verl"),
        ([".metadata", "__0_0.distcp"], "torch.distributed.checkpoint"),
        (["checkpoint-500/trainer_state.json"], "it is a checkpoint of transformers"),
        (["notes.txt"], "manifest.json is missing"),
    ],
)
def test_folders_of_other_programs(tmp_path: Path, files: list[str], message: str) -> None:
    for file in files:
        (tmp_path / "given" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "given" / file).write_text("x")
    assert message in refusal(tmp_path / "given")


def test_a_missing_path_and_a_file(tmp_path: Path) -> None:
    assert "there is no such folder" in refusal(tmp_path / "step_9")
    (tmp_path / "step_8").write_text("")
    assert "it is a file" in refusal(tmp_path / "step_8")


def test_a_run_folder_is_refused_with_its_newest_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "given" / layout.FOLDER
    root.mkdir(parents=True)
    for step in (1, 2):
        save(Disk(), root, step)
    for folder in (root.parent, root):
        assert f"give one of them, such as {root / 'step_2'}" in refusal(folder)
    (root / "step_2/latest").unlink()
    assert "latest: No such file" in refusal(root / "step_2")
