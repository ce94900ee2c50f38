"""YAML of others: what is wrong and where, and no file that grows without end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.config.helpers import python_m
from trainer.base.errors import UserError
from trainer.base.yaml_files import require_readable

BOMB = "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)
BAD = [
    (BOMB.encode(), r"line \d+: more than 100000 values once its aliases"),
    (b"a: &a [*a]\n", "line 1: a value holds itself"),
    (b"trainer:\n\tseed: 1\n", "line 2, column 1: .*indent with spaces"),
    (b"a: [1, 2\nb: 3\n", "line 2"),
    (b"a: \xff\n", "byte 3 is no UTF-8"),
    (b"\x00\x01\x02", "no YAML"),
    (b"[" * 5000, "nested too deeply|no YAML"),
    (b"a: b\n" * 300_000, "can't be a file of settings"),
    (b"a: *nothing\n", "undefined alias"),
]


@pytest.mark.parametrize(("text", "message"), BAD)
def test_one_message_with_file_and_line(tmp_path: Path, text: bytes, message: str) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(text)
    with pytest.raises(UserError, match=message) as error:
        require_readable(path)
    assert str(path) in str(error.value)
    assert "\n" not in str(error.value)


def test_aliases_of_sensible_size_are_fine(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("a: &a {x: 1}\nb: *a\nc: *a\n")
    require_readable(path)


@pytest.mark.parametrize("text", [BOMB, "trainer:\n\tseed: 1\n"], ids=["bomb", "tab"])
def test_a_folder_of_settings_from_elsewhere(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.yaml").write_text(text)
    done = python_m("trainer", "--config-path", str(tmp_path), "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(f"Error: {tmp_path}/config.yaml")
    assert len(done.stderr.splitlines()) == 1


def test_another_file_of_the_folder_may_be_anything_but_endless(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("trainer: {seed: 1}\n")
    (tmp_path / "notes.yaml").write_text("a: [\n")
    done = python_m("trainer", "--config-path", str(tmp_path), "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (tmp_path / "notes.yaml").write_text(BOMB)
    done = python_m("trainer", "--config-path", str(tmp_path), "--cfg", "job", cwd=tmp_path)
    assert done.returncode == 2
    assert "notes.yaml" in done.stderr
