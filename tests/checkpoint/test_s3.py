"""The mirror in a real S3 API (moto's server on this machine).

An upload that was cut short is never used, a machine with an empty run folder resumes from the
newest whole checkpoint, and access that fails is an error at the start.
"""

from __future__ import annotations

import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from moto import settings
from moto.server import ThreadedMotoServer
from s3fs import S3FileSystem

from tests.checkpoint.fork_server import ForkServer
from tests.checkpoint.test_crash_points import Runs
from trainer.base.errors import UserError
from trainer.checkpoint.store import layout, manifest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.mirror import Mirror, fetch_newer

URL = "s3://bucket/mirror"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment that points to the server; this process has it already."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield _set_access(monkeypatch, f"http://{host}:{port}")
    server.stop()


def _set_access(monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, str]:
    access = {
        "AWS_ENDPOINT_URL": url,
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": "tests",
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_MAX_ATTEMPTS": "1",
    }
    for name, value in access.items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()
    return access


def test_uploads_cut_short_and_an_empty_machine(
    s3: dict[str, str], fork_server: ForkServer, memory: Path
) -> None:
    runs = Runs(fork_server, memory / "s3", 1, URL, s3)
    folder = runs.base
    mirror = Mirror(URL)
    assert mirror.steps() == [3, 2], "older ones are removed"
    instants = runs.attempt(folder, saves=1, crash=(0, -1)).instants
    first = instants.index("upload step_4/state/rank_0.safetensors")
    last = instants.index(f"upload step_4/{manifest.NAME}")
    for step, instant in ((5, (first + last) // 2), (6, last)):
        ended = runs.attempt(folder, saves=1, crash=(0, instant))
        assert ended.killed and ended.instants[-1].startswith(f"upload step_{step}/")
        assert mirror.steps()[0] == 4 and mirror._fs.exists(f"bucket/mirror/step_{step}")
        root = memory / f"another machine {step}"
        root.mkdir()
        assert fetch_newer(mirror, root, Disk(), "1-ab") == root / "step_4"
        assert manifest.problems(root / "step_4", manifest.read(root / "step_4")) == []
    shutil.rmtree(folder / "run" / layout.FOLDER)
    assert runs.attempt(folder, saves=2).restored == 4
    assert mirror.steps() == [6, 5]
    left = [str(path).rsplit("/", 1)[-1] for path in mirror._fs.ls("bucket/mirror")]
    assert sorted(left) == ["step_5", "step_6"], "leftovers of uploads cut short"


def test_access_that_fails_is_one_message(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(
        UserError,
        match=r"default_hdfs_dir=s3://bucket/mirror can't be written \(The AWS Access Key Id",
    ):
        Mirror(URL)


def test_an_address_without_a_server_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    # The socket holds the port without listening: no other program may take it meanwhile.
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        _set_access(monkeypatch, f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(UserError, match=r"default_hdfs_dir=s3://other/run can't be written"):
            Mirror("s3://other/run")
