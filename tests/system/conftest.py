"""Real daemons: a private one-machine Slurm for the session, and a small Apptainer image."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NODES = 9
"""Nodes of the Slurm lab, ``n1`` and so on."""
DAEMONS = ("slurmctld", "slurmd", "slurmdbd", "munged", "mariadbd", "sbatch")


def _free_base_port() -> int:
    """The first port of a free range. Labs that start at the same time need different ranges."""
    blocks = 70
    for attempt in range(blocks):
        base = 28200 + (os.getpid() + attempt) % blocks * 40
        try:
            for port in (base, base + 1, *range(base + 11, base + 11 + NODES)):
                with socket.socket() as probe:
                    probe.bind(("127.0.0.1", port))
        except OSError:
            continue
        return base
    pytest.skip("no free ports for a private Slurm")


@pytest.fixture(scope="session")
def slurm_lab() -> Iterator[Path]:
    """The folder of a running Slurm lab; SLURM_CONF names its configuration during the session."""
    if os.getuid() != 0:
        pytest.skip("the Slurm lab starts daemons and must be root")
    path = f"{os.environ['PATH']}:/usr/sbin:/sbin"
    missing = [tool for tool in DAEMONS if shutil.which(tool, path=path) is None]
    if missing:
        pytest.skip(
            f"{', '.join(missing)} not installed; slurm/dev/install.sh installs them on Debian"
        )
    # MariaDB's user may not enter pytest's own folders.
    lab = Path(tempfile.mkdtemp(prefix="plimsoll-slurm-"))
    os.chmod(lab, 0o755)
    up = subprocess.run(
        [str(ROOT / "slurm/dev/up.sh"), str(lab), str(NODES), str(_free_base_port())],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    try:
        if up.returncode:
            pytest.fail(f"the Slurm lab didn't start: {up.stdout}{up.stderr}")
        before = os.environ.get("SLURM_CONF")
        os.environ["SLURM_CONF"] = str(lab / "conf/slurm.conf")
        yield lab
        os.environ.pop("SLURM_CONF", None)
        if before is not None:
            os.environ["SLURM_CONF"] = before
    finally:
        subprocess.run(
            [str(ROOT / "slurm/dev/down.sh"), str(lab), "now"],
            timeout=500,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        shutil.rmtree(lab, ignore_errors=True)


@pytest.fixture(scope="session")
def image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small image, built by containers/build-test.sh."""
    if shutil.which("apptainer") is None:
        pytest.skip(
            "apptainer is not installed; containers/install-apptainer.sh installs it on Debian"
        )
    sif = tmp_path_factory.mktemp("image") / "test.sif"
    built = subprocess.run(
        [str(ROOT / "containers/build-test.sh"), str(sif)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "PATH": f"{os.environ['PATH']}:/usr/sbin:/sbin"},
    )
    if built.returncode:
        pytest.fail(f"the test image wasn't built: {built.stdout[-2000:]}{built.stderr[-2000:]}")
    return sif


def python_binds() -> list[str]:
    """The folders that an image has to bind to run this interpreter: the base Python and the
    virtual environment.
    """
    base = Path(sys.base_prefix).resolve()
    return sorted({str(base), str(Path(sys.prefix).resolve())})
