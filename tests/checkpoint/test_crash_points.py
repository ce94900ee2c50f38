"""kill -9 before, and halfway through, every single operation on disk and mirror.

Of a save, of the removal of old checkpoints, of the start on a damaged or littered folder. After
each there is exactly one allowed outcome.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.fork_server import HANGS_S, ForkServer
from trainer.checkpoint.store import layout, manifest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.mirror import Mirror, fetch_newer

TARGET = "tests.checkpoint.crash_attempt:run_attempt"


@dataclass
class AttemptResult:
    """What an attempt printed and how it ended."""

    restored: int | None
    instants: list[str]
    killed: bool


class Runs:
    """Attempts of runs, each in its own copy of a folder with checkpoints.

    Three saves have filled that folder; the last two are kept.
    """

    def __init__(
        self,
        fork_server: ForkServer,
        home: Path,
        size: int,
        mirror: str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._fork_server = fork_server
        self._home = home
        self._size = size
        self._mirror = mirror
        self._env = env or {}
        self._count = 0
        self.base = home / "base"
        (self.base / "run").mkdir(parents=True)
        self.attempt(self.base, saves=3)

    def copy(self) -> Path:
        self._count += 1
        folder = self._home / f"{self._count}"
        shutil.copytree(self.base, folder)
        return folder

    def attempt(
        self,
        folder: Path,
        *,
        saves: int = 0,
        crash: tuple[int, int] = (0, -1),
        settings: dict[str, Any] | None = None,
    ) -> AttemptResult:
        """``crash``: rank, and number of the instant at which all are killed; -1: never."""
        self._count += 1
        log = folder / f"log{self._count}"
        all_settings = {"mirror": self._mirror or f"file://{folder}/mirror", **(settings or {})}
        ranks = self._fork_server.start(
            TARGET,
            self._size,
            [str(folder), self._count, saves, all_settings],
            log,
            env={**self._env, "PLIMSOLL_CRASH": f"{crash[0]},{crash[1]}"},
        )
        if crash[1] < 0:
            ranks.finish()
        else:
            assert ranks.wait_until_gone(HANGS_S), folder
        restored = _values_of(log, "restored ")
        return AttemptResult(
            int(restored[0]) if restored else None,
            _values_of(log, "instant "),
            killed=not Path(f"{log}.{crash[0]}.exit").exists(),
        )


def _values_of(log: Path, word: str) -> list[str]:
    """The rest of each line that begins with ``word``."""
    lines = log.read_text().splitlines()
    return [line.removeprefix(word) for line in lines if line.startswith(word)]


@dataclass
class Scenario:
    """An attempt in a prepared folder, to be killed at each instant."""

    name: str
    saves: int = 0
    settings: dict[str, Any] = field(default_factory=dict)
    leaves: frozenset[str] = frozenset()
    """Names besides the checkpoints that may be there in the end."""
    skips: tuple[str, ...] = ()
    """Operations that another scenario has, too."""

    def prepare(self, folder: Path) -> None:
        root = folder / "run" / layout.FOLDER
        mirror = folder / "mirror"
        if self.name in ("damaged", "replaced"):
            weights = next((root / "step_3").glob("*/*.pt"))
            weights.write_bytes(weights.read_bytes()[:-1])
            if self.name == "damaged":
                shutil.rmtree(mirror)
        elif self.name == "littered":
            shutil.copytree(root / "step_3", root / "step_4.tmp-1-dead")
            shutil.copytree(root / "step_3", root / "step_1.gone")
            (root / "latest.tmp-1-dead").write_text("step_4")
            (root / "resumed_from.tmp").write_text("/")
        elif self.name == "fetched":
            shutil.rmtree(root)
        elif self.name == "back":
            self.settings = {"resume_mode": "path", "resume_from_path": str(root / "step_2")}

    def expected(self, done: list[str]) -> int:
        """The step that the next attempt must restore when ``done`` was done before the end."""
        if self.name in ("damaged", "back"):
            return 2
        return 3 + ("rename step_4.tmp to step_4" in done)


SCENARIOS = [
    Scenario("save", saves=1),
    Scenario("damaged", leaves=frozenset({"step_3.corrupt"})),
    Scenario(
        "replaced",
        leaves=frozenset({"step_3.corrupt"}),
        skips=("download ", "mkdir ", "fsync step_3.tmp"),
    ),
    Scenario("littered"),
    Scenario("fetched"),
    Scenario("back", leaves=frozenset({"step_3.superseded", "resumed_from"})),
]


@pytest.fixture(scope="module")
def one_rank(fork_server: ForkServer, memory: Path) -> Runs:
    return Runs(fork_server, memory / "one_rank", 1)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_one_rank_killed_at_every_instant(one_rank: Runs, scenario: Scenario) -> None:
    instants = _instants(one_rank, scenario, 0)
    assert len(instants) > 5
    for number, instant in enumerate(instants):
        if not instant.startswith(scenario.skips):
            _kill_at(one_rank, scenario, 0, number, instants)


@pytest.fixture(scope="module")
def two_ranks(fork_server: ForkServer, memory: Path) -> Runs:
    return Runs(fork_server, memory / "two_ranks", 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_killed_while_they_write_and_publish(two_ranks: Runs, rank: int) -> None:
    """All instants of rank 1; those of rank 0 from its last file to ``latest``, when rank 1
    matters.
    """
    scenario = Scenario("save", saves=1)
    instants = _instants(two_ranks, scenario, rank)
    first = 0
    last = len(instants)
    if rank == 0:
        first = instants.index("write step_4.tmp/manifest.json") - 1
        last = instants.index("rename latest.tmp to latest") + 2
    for number in range(first, last):
        _kill_at(two_ranks, scenario, rank, number, instants)


def test_validation_of_an_older_checkpoint_leaves_the_newer_ones(one_rank: Runs) -> None:
    folder = one_rank.copy()
    root = folder / "run" / layout.FOLDER
    settings = {"resume_mode": "path", "resume_from_path": str(root / "step_2"), "val_only": True}
    assert one_rank.attempt(folder, settings=settings).restored == 2
    assert {p.name for p in root.iterdir()} == {"step_2", "step_3", layout.LATEST}
    assert one_rank.attempt(folder, saves=1).restored == 3


def _instants(runs: Runs, scenario: Scenario, rank: int) -> list[str]:
    """The instants of an attempt that isn't killed."""
    folder = runs.copy()
    scenario.prepare(folder)
    result = runs.attempt(
        folder, saves=scenario.saves, settings=scenario.settings, crash=(rank, -1)
    )
    return result.instants


def _kill_at(runs: Runs, scenario: Scenario, rank: int, number: int, instants: list[str]) -> None:
    folder = runs.copy()
    case = f"{scenario.name}: rank {rank} killed at {number}: {instants[number]}"
    root = folder / "run" / layout.FOLDER
    scenario.prepare(folder)
    killed = runs.attempt(
        folder, saves=scenario.saves, settings=scenario.settings, crash=(rank, number)
    )
    assert killed.killed and killed.instants == instants[: number + 1], case
    done = instants[:number]
    latest = layout.read_latest(root)
    if latest is not None:
        assert manifest.read(root / latest), case
    if scenario.name == "save":
        uploaded = "upload half of step_4/manifest.json" in done
        _check_mirror(folder, 3 + uploaded, case)
    expected = scenario.expected(done)
    after = runs.attempt(folder, saves=1, settings=scenario.settings)
    assert after.restored == expected, f"{case}: restored {after.restored}"
    names = {p.name for p in root.iterdir()}
    kept = {f"step_{expected}", f"step_{expected + 1}"}
    assert kept | {layout.LATEST} <= names, f"{case}: {names}"
    assert names - kept - {layout.LATEST} <= scenario.leaves, f"{case}: {names}"
    assert (root / layout.LATEST).read_text() == f"step_{expected + 1}\n", case
    for name in kept:
        assert manifest.problems(root / name, manifest.read(root / name)) == [], case
    shutil.rmtree(folder)


def _check_mirror(folder: Path, step: int, case: str) -> None:
    """A machine with an empty run folder fetches ``step``: a half upload is never taken."""
    root = folder / "elsewhere"
    root.mkdir()
    fetched = fetch_newer(Mirror(f"file://{folder}/mirror"), root, Disk(), "1-ab")
    assert fetched == root / f"step_{step}", f"{case}: the mirror gave {fetched}"
