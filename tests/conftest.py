"""Fixtures for all tests. With PLIMSOLL_STRICT_SKIPS=1 a skipped test fails, unless this machine
lacks what it needs.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("WANDB_MODE", "offline")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Under nohup SIGHUP is ignored, which children would inherit. A handler of our own goes on ignoring
# it here, and children begin with the default action.
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)

ROOT = Path(__file__).resolve().parent.parent

# By default Hypothesis fails an example that takes 0.2 s, as any may on a busy machine, and draws
# other examples in each session: the same code would pass in one session and fail in the next.
# ``--hypothesis-profile=default`` searches for new examples.
hypothesis.settings.register_profile(
    "suite",
    deadline=None,
    derandomize=True,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("suite")


def _is_excused(reason: str) -> bool:
    """Whether a test skipped for ``reason`` needs something that this machine lacks."""
    missing = {
        "CUDA": not Path("/dev/nvidia0").exists(),
        "root": os.geteuid() != 0,
        "Debian": shutil.which("apt-get") is None,
    }
    return any(word in reason and lacks for word, lacks in missing.items())


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Iterator[None]:
    outcome = yield
    report = outcome.get_result()  # type: ignore[attr-defined]
    if (
        report.skipped
        and os.environ.get("PLIMSOLL_STRICT_SKIPS") == "1"
        and not hasattr(report, "wasxfail")
    ):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not _is_excused(reason):
            report.outcome = "failed"
            report.longrepr = f"skipped on a machine that could have run it: {reason}"


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with GSM8K; tests that need it skip without it."""
    folder = Path(os.environ.get("PLIMSOLL_SHARED", ROOT.parent / "shared"))
    if not (folder / "data").is_dir():
        pytest.skip(
            "no ../shared/data (GSM8K) beside the checkout; PLIMSOLL_SHARED names another place"
        )
    return folder


@pytest.fixture(scope="session", autouse=True)
def _private_extensions(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """DeepSpeed compiles into a folder of this session, so that the lock of a killed build does not
    block the next session.
    """
    if "TORCH_EXTENSIONS_DIR" not in os.environ:
        base = tmp_path_factory.getbasetemp()
        base = base.parent if os.environ.get("PYTEST_XDIST_WORKER") else base
        os.environ["TORCH_EXTENSIONS_DIR"] = str(base / "torch_extensions")
    yield
