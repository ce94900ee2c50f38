"""Rewards, agents and templates are frozen with the run: what was started is what every attempt
runs.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.config.helpers import REPO, minimal_settings
from trainer.base.errors import UserError
from trainer.base.run_folder import read_json
from trainer.base.user_code import load_module, modules_beside
from trainer.config import freeze, load, load_frozen
from trainer.config.schema import Config
from trainer.config.user_files import recorded_digests, use_frozen

REWARD = "from frozen_helper import RIGHT\n\ndef compute_score(**_):\n    return RIGHT\n"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder, which is the current one."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "score.py").write_text(REWARD)
    (folder / "frozen_helper.py").write_text("import frozen_deeper\nRIGHT = 1.0\n")
    (folder / "frozen_deeper.py").write_text("def late():\n    import frozen_package.inner\n")
    (folder / "frozen_package").mkdir()
    (folder / "frozen_package/inner.py").write_text("")
    (folder / "unrelated.py").write_text("not even Python")
    (folder / "chat.jinja").write_text("{{ messages }}")
    monkeypatch.chdir(folder)
    return folder


def settings(run: Path, **changes: object) -> Config:
    keys = {
        "trainer.default_local_dir": str(run),
        "custom_reward_function.path": "score.py",
        "data.chat_template": "chat.jinja",
    }
    return load(minimal_settings(**{**keys, **changes}))


def train_a_step(run: Path) -> None:
    (run / "metrics.jsonl").write_text('{"step": 1}\n')


def test_the_modules_beside_a_file_are_those_that_it_imports(source: Path) -> None:
    found = modules_beside(source / "score.py", key="k")
    assert sorted(found) == [
        "frozen_deeper.py",
        "frozen_helper.py",
        "frozen_package/inner.py",
    ]


def test_every_attempt_runs_the_copy(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    freeze(settings(run), run)
    for path in source.glob("*.*"):
        path.write_text("changed since\n")
    config = use_frozen(load_frozen(run), run)
    assert Path(str(config.data.chat_template)).read_text() == "{{ messages }}"
    path = str(config.custom_reward_function.path)
    assert Path(path).read_text() == REWARD and path.startswith(f"{run}/user/")
    code = (
        "import sys; from trainer.base.user_code import load_module\n"
        "m, _ = load_module(sys.argv[1], key='k'); print(m.compute_score(), m.__file__)"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, path],
        env={"PYTHONPATH": str(REPO)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.stdout.split() == ["1.0", str(source / "score.py")], done.stderr


def test_a_changed_file_is_refused_and_taken_where_asked(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    freeze(settings(run), run)
    (source / "score.py").write_text(REWARD + "# before the first step\n")
    freeze(settings(run), run)
    train_a_step(run)
    freeze(settings(run), run)  # as it was
    before = recorded_digests(run)
    (source / "frozen_helper.py").write_text("RIGHT = 2.0\n")
    with pytest.raises(UserError) as error:
        freeze(settings(run), run)
    message = str(error.value)
    assert "custom_reward_function.path" in message and "frozen_helper.py" in message
    assert "trainer.accept_changed_files=true" in message and recorded_digests(run) == before
    freeze(settings(run, **{"trainer.accept_changed_files": True}), run)
    key = "custom_reward_function.path"
    assert "frozen_helper.py" in capsys.readouterr().out
    assert recorded_digests(run)[key] != before[key]
    assert read_json(run / "user/files.json")[key]["replaced"] == [before[key]]
    freeze(settings(run), run)  # the next command goes on with the new one


def test_a_copy_that_was_edited_is_refused(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    freeze(settings(run), run)
    copy = Path(str(use_frozen(load_frozen(run), run).custom_reward_function.path))
    copy.write_text("def compute_score(**_): return 0\n")
    with pytest.raises(UserError, match="was changed since the run was started"):
        use_frozen(load_frozen(run), run)


def test_a_started_run_goes_on_without_the_original(source: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    freeze(settings(run, **{"custom_reward_function.path": f"{source}/score.py"}), run)
    train_a_step(run)
    (source / "score.py").unlink()
    freeze(settings(run, **{"custom_reward_function.path": f"{source}/score.py"}), run)
    assert Path(str(use_frozen(load_frozen(run), run).custom_reward_function.path)).is_file()


def test_a_module_beside_with_the_name_of_another_is_refused(tmp_path: Path) -> None:
    (tmp_path / "yaml.py").write_text("x = 1\n")
    (tmp_path / "json.py").write_text("x = 1\n")
    for name in ("yaml", "json"):
        (tmp_path / f"uses_{name}.py").write_text(f"import {name}\n")
        with pytest.raises(UserError, match=f"{name}.*another name"):
            load_module(tmp_path / f"uses_{name}.py", key="k")


def test_modules_beside_load_without_a_copy(tmp_path: Path) -> None:
    (tmp_path / "plain_reward.py").write_text("import plain_helper\n")
    (tmp_path / "plain_helper.py").write_text("x = 1\n")
    module, _ = load_module(tmp_path / "plain_reward.py", key="k")
    assert module.plain_helper.x == 1


def test_a_file_that_is_no_python_is_named(source: Path, tmp_path: Path) -> None:
    (source / "frozen_deeper.py").write_text("def (:\n")
    with pytest.raises(UserError, match=r"function\.path: .*frozen_deeper\.py, line 1"):
        freeze(settings(tmp_path / "run"), tmp_path / "run")
