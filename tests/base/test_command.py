"""A command ends with one message, whatever happens."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from trainer.base.command import run_command
from trainer.base.errors import UserError

PROGRAM = """
import sys
from trainer.base.command import run_command
def main():
    {body}
    return 0
sys.exit(run_command(main))
"""


def _bash(body: str, redirection: str) -> subprocess.CompletedProcess[str]:
    script = f'set -o pipefail; "$0" -c "$1" {redirection}'
    return subprocess.run(
        ["bash", "-c", script, sys.executable, PROGRAM.format(body=body)],
        capture_output=True,
        text=True,
        timeout=60,
    )


def _raise(error: BaseException) -> Any:
    def command() -> int:
        raise error

    return command


@pytest.mark.parametrize("redirection", [">&-", "2>&-", "<&-", ">&- 2>&- <&-"])
def test_closed_streams_are_the_null_device(redirection: str, tmp_path: Path) -> None:
    """Otherwise the first file that is opened becomes stdout."""
    file = tmp_path / "file"
    body = f"f = open({str(file)!r}, 'w'); print('lost'); sys.stderr.write('lost'); f.write('kept')"
    done = _bash(body, redirection)
    assert done.returncode == 0, done.stderr
    assert file.read_text() == "kept"
    assert "Traceback" not in done.stderr


def test_a_reader_that_has_gone_is_no_error() -> None:
    done = _bash("[print('x' * 1000) for _ in range(1000)]", "| head -c 5")
    assert done.stdout == "xxxxx"
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(_raise(KeyboardInterrupt())) == 130
    assert capsys.readouterr().err == "Interrupted.\n"


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (UserError("type this instead"), "Error: type this instead\n"),
        (OSError(errno.ENAMETOOLONG, "File name too long", "aaa"), "give a shorter one"),
        (FileNotFoundError(errno.ENOENT, "No such file", b"x\xff"), "x\\udcff: No such file"),
        (PermissionError(errno.EACCES, "Permission denied", "/x"), "no access to /x"),
        (RecursionError("maximum"), "nested too deeply"),
    ],
)
def test_wrong_input_is_one_message(error: Exception, message: str, monkeypatch: Any) -> None:
    shown: list[str] = []
    monkeypatch.setattr(sys.stderr, "write", shown.append)
    assert run_command(_raise(error)) == 2
    assert message in "".join(shown)


def test_what_no_check_foresaw_leaves_its_traceback_in_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert run_command(_raise(ZeroDivisionError("by zero"))) == 1
    shown = capsys.readouterr().err
    assert "Error: ZeroDivisionError: by zero\n" in shown
    assert "Traceback" not in shown
    (file,) = tmp_path.iterdir()
    assert str(file) in shown
    assert "ZeroDivisionError: by zero" in file.read_text()
    assert file.stat().st_mode & 0o077 == 0
