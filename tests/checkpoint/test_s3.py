"""The mirror in a real S3 API (moto's server on this machine): an upload that was cut short is
never used, a machine with an empty run folder goes on from the newest whole one, and access that
fails is told at the start.
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

from tests.checkpoint.test_crash_points import Runs
from tests.checkpoint.zygote import Zygote
from trainer.base.errors import UserError
from trainer.checkpoint.store import commit, manifest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.mirror import Mirror, fetch_newer

URL = "s3://bucket/mirror"


@pytest.fixture
def s3(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    """The environment that leads to the server; this process has it already."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield _access(monkeypatch, f"http://{host}:{port}")
    server.stop()


def _access(monkeypatch: pytest.MonkeyPatch, url: str) -> dict[str, str]:
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
    s3: dict[str, str], zygote: Zygote, memory: Path
) -> None:
    runs = Runs(zygote, memory / "s3", 1, URL, s3)
    where, mirror = runs.base, Mirror(URL)
    assert mirror.steps() == [3, 2], "older ones are removed"
    instants = runs.live(where, saves=1, crash=(0, -1)).instants
    first, last = (
        instants.index(f"upload step_4/{name}")
        for name in ("state/rank_0.safetensors", manifest.NAME)
    )
    for step, at in ((5, (first + last) // 2), (6, last)):
        ended = runs.live(where, saves=1, crash=(0, at))
        assert ended.killed and ended.instants[-1].startswith(f"upload step_{step}/")
        assert mirror.steps()[0] == 4 and mirror._fs.exists(f"bucket/mirror/step_{step}")
        root = memory / f"another machine {step}"
        root.mkdir()
        assert fetch_newer(mirror, root, Disk(), "1-ab") == root / "step_4"
        assert manifest.problems(root / "step_4", manifest.read(root / "step_4")) == []
    shutil.rmtree(where / "run" / commit.FOLDER)
    assert runs.live(where, saves=2).restored == 4
    assert mirror.steps() == [6, 5]
    left = [str(path).rsplit("/", 1)[-1] for path in mirror._fs.ls("bucket/mirror")]
    assert sorted(left) == ["step_5", "step_6"], "rubbish of uploads cut short"


def test_access_that_fails_is_one_message(
    s3: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(settings, "INITIAL_NO_AUTH_ACTION_COUNT", 0)
    with pytest.raises(
        UserError,
        match=r"default_hdfs_dir=s3://bucket/mirror can't be written \(The AWS Access Key Id",
    ):
        Mirror(URL)


def test_an_address_where_nobody_is_is_one_message(monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        socket.socket() as nobody
    ):  # holds the port and doesn't listen: no other program may take it meanwhile
        nobody.bind(("127.0.0.1", 0))
        _access(monkeypatch, f"http://127.0.0.1:{nobody.getsockname()[1]}")
        with pytest.raises(UserError, match=r"default_hdfs_dir=s3://other/run can't be written"):
            Mirror("s3://other/run")
