"""The image's definition and its builder, as far as they can be told without a network."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs.submit.snapshot import image_digest
from tests.jobs.conftest import put

CONTAINERS = Path(__file__).parents[2] / "containers"
_spec = importlib.util.spec_from_file_location("image_check", CONTAINERS / "check.py")
assert _spec is not None and _spec.loader is not None
check = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check)


def sections() -> dict[str, str]:
    """The definition's sections by name; its head, where the base image stands, as ``""``."""
    parts = re.split(r"^%(\w+)\n", (CONTAINERS / "plimsoll.def").read_text(), flags=re.MULTILINE)
    return {"": parts[0]} | dict(zip(parts[1::2], parts[2::2], strict=True))


def test_definition_has_what_a_rank_needs() -> None:
    parts = sections()
    assert list(parts) == ["", "labels", "files", "post", "environment", "test", "runscript"]
    sources = [line.split()[0] for line in parts["files"].splitlines() if line.strip()]
    targets = [line.split()[1] for line in parts["files"].splitlines() if line.strip()]
    assert sources == ["requirements/cuda.txt", "containers/check.py"]
    assert all((CONTAINERS.parent / source).is_file() for source in sources)
    assert (
        f"--no-deps -r {targets[0]}" in parts["post"]
        and f"python3 {targets[1]} {targets[0]}" in parts["test"]
    )
    labels = dict(line.split(maxsplit=1) for line in parts["labels"].strip().splitlines())
    assert labels["plimsoll.commit"] == "@COMMIT@" and labels["plimsoll.locked"] == "@LOCKED@"
    locked = check.pins((CONTAINERS.parent / "requirements/cuda.txt").read_text())
    major = ".".join(locked["nvidia-cuda-runtime"].split(".")[:2])
    assert f"From: nvidia/cuda:{major}" in parts[""]  # the toolkit that torch was built with
    assert {*check.IMPORTED, "ninja"} <= set(locked)


@pytest.mark.parametrize("section", ["post", "environment", "test", "runscript"])
def test_shell_sections_are_for_dash(section: str) -> None:
    """Apptainer hands them to /bin/sh as they stand, indented: an indented here-document would
    never end.
    """
    text = sections()[section]
    assert "<<" not in text and not re.search(
        r"command -v \S+ \S", text
    )  # dash looks at the first word only
    subprocess.run(["sh", "-n"], input=text.encode(), check=True, timeout=100)


def test_the_images_own_check(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text(
        f"# locked\npytest=={pytest.__version__}\nno-such==1 ; extra\n"
    )
    assert check.problems(tmp_path / "good.txt", ["json"], ["sh"]) == [
        "no-such: not installed, locked is 1"
    ]
    (tmp_path / "bad.txt").write_text("pytest==1.0\n")
    found = check.problems(tmp_path / "bad.txt", ["no_such_module"], ["no-such-tool"])
    assert found[0] == f"pytest: {pytest.__version__}, locked is 1.0"
    assert (
        "import no_such_module: ModuleNotFoundError" in found[1]
        and found[2] == "no-such-tool is not on PATH"
    )


@pytest.fixture
def builder(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """build.sh with a fake apptainer, over an image that is there already."""
    put(
        tmp_path,
        "apptainer",
        """
case $1 in
  build)
    echo "FATAL: $BUILD_SAYS" >&2; [ -z "$BUILD_SAYS" ] || exit 255
    cp "${@: -1}" "${@: -2:1}" ;;
  test) exit "${TEST_CODE:-0}" ;;
esac""",
    )
    (tmp_path / "x.sif").write_text("old")

    def build(**env: str) -> subprocess.CompletedProcess[str]:
        path = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "BUILD_SAYS": ""}
        command = ["bash", str(CONTAINERS / "build.sh"), str(tmp_path / "x.sif")]
        return subprocess.run(
            command, env={**os.environ, **path, **env}, capture_output=True, text=True, timeout=200
        )

    return build


def test_build_says_what_it_made(
    builder: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    done = builder(BASE_IMAGE="mirror.site/cuda:13")
    text = (tmp_path / "x.sif").read_text()
    assert "plimsoll.locked sha256:" in text and "@" not in text.split("%files")[0]
    assert "From: mirror.site/cuda:13\n" in text
    assert re.search(r"container\.digest=sha256:[0-9a-f]{64}$", done.stdout.strip())


NO_HUB = (
    'While performing build: conveyor failed to get: Get "https://index.docker.io/v2/": '
    "dial tcp: no such host"
)


@pytest.mark.parametrize(
    ("env", "message"),
    [
        (
            {"BUILD_SAYS": NO_HUB},
            "the base image nvidia/cuda:13.0.2-devel-ubuntu24.04 cannot be fetched (no such host)",
        ),
        ({"BUILD_SAYS": NO_HUB}, "or name a mirror's copy: BASE_IMAGE="),
        (
            {"BUILD_SAYS": "while running %post section: exit status 1"},
            "the build failed: while running %post section",
        ),
        ({"TEST_CODE": "1"}, "the new image failed its %test"),
    ],
)
def test_a_build_that_fails_says_why_once_and_leaves_the_old_image(
    env: dict[str, str],
    message: str,
    builder: Callable[..., subprocess.CompletedProcess[str]],
    tmp_path: Path,
) -> None:
    failed = builder(**env)
    said = [line for line in failed.stderr.splitlines() if line.startswith("build.sh: ")]
    assert failed.returncode == 1 and len(said) == 1 and message in said[0]
    assert (tmp_path / "x.sif").read_text() == "old" and not (tmp_path / "x.sif.new").exists()


@pytest.mark.parametrize("script", sorted(CONTAINERS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse(script: Path) -> None:
    subprocess.run(f"bash -n {shlex.quote(str(script))}", shell=True, check=True, timeout=100)
    assert os.access(script, os.X_OK)


def test_an_image_has_its_digest_where_no_cache_can_be_written(tmp_path: Path) -> None:
    image = tmp_path / "a.sif"
    image.write_bytes(b"image")
    expected = f"sha256:{hashlib.sha256(b'image').hexdigest()}"
    cache = tmp_path / "cache/digests.json"
    assert image_digest(image, cache) == expected and expected in cache.read_text()
    assert image_digest(image, image / "below/a/file.json") == expected
    image.write_bytes(b"another image")
    assert image_digest(image, image / "below/a/file.json") != expected
    os.mkfifo(tmp_path / "pipe.sif")
    with pytest.raises(OSError, match="Invalid argument"):
        image_digest(tmp_path / "pipe.sif", cache)
