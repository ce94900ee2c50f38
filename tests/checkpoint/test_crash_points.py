"""kill -9 before, and halfway through, every single operation on disk and mirror: of a save, of the
removal of old checkpoints, of the start on a damaged or littered folder. After each there is
exactly one allowed outcome.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.zygote import HANGS_S, Zygote
from trainer.checkpoint.store import commit, manifest
from trainer.checkpoint.store.disk import Disk
from trainer.checkpoint.store.mirror import Mirror, fetch_newer

WHERE = "tests.checkpoint.lives:life"


@dataclass
class Life:
    """What one life of the run left behind."""

    restored: int | None
    instants: list[str]
    killed: bool


class Runs:
    """Lives of runs, each in its own copy of a folder that three saves have filled (of which the
    last two are kept).
    """

    def __init__(
        self,
        zygote: Zygote,
        home: Path,
        size: int,
        mirror: str | None = None,
        env: dict[str, str] | None = None,
    ) -> None:
        self._zygote, self._home, self._size, self._mirror, self._env = (
            zygote,
            home,
            size,
            mirror,
            env or {},
        )
        self._count = 0
        self.base = home / "base"
        (self.base / "run").mkdir(parents=True)
        self.live(self.base, saves=3)

    def copy(self) -> Path:
        self._count += 1
        folder = self._home / f"{self._count}"
        shutil.copytree(self.base, folder)
        return folder

    def live(
        self,
        where: Path,
        *,
        saves: int = 0,
        crash: tuple[int, int] = (0, -1),
        resume: dict[str, Any] | None = None,
    ) -> Life:
        self._count += 1
        log = where / f"log{self._count}"
        settings = {"mirror": self._mirror or f"file://{where}/mirror", **(resume or {})}
        ranks = self._zygote.start(
            WHERE,
            self._size,
            [str(where), self._count, saves, settings],
            log,
            env={**self._env, "PLIMSOLL_CRASH": f"{crash[0]},{crash[1]}"},
        )
        if crash[1] < 0:
            ranks.finish()
        else:
            assert ranks.until_gone(HANGS_S), where
        lines = log.read_text().splitlines()
        restored = [
            int(line.removeprefix("restored ")) for line in lines if line.startswith("restored ")
        ]
        return Life(
            restored[0] if restored else None,
            [line.removeprefix("instant ") for line in lines if line.startswith("instant ")],
            killed=not Path(f"{log}.{crash[0]}.exit").exists(),
        )


@dataclass
class Scenario:
    """``saves`` under ``resume`` in a prepared folder, ended at each instant. ``leaves``: names
    beside the checkpoints that may be there in the end.
    """

    name: str
    saves: int = 0
    resume: dict[str, Any] = field(default_factory=dict)
    leaves: frozenset[str] = frozenset()
    skips: tuple[str, ...] = ()
    """Operations that another scenario has too."""

    def prepare(self, where: Path) -> None:
        root, mirror = where / "run" / commit.FOLDER, where / "mirror"
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
            self.resume = {"resume_mode": "path", "resume_from_path": str(root / "step_2")}

    def expected(self, done: list[str]) -> int:
        """The step that the next life must restore when these operations were done before the
        end.
        """
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
def alone(zygote: Zygote, memory: Path) -> Runs:
    return Runs(zygote, memory / "alone", 1)


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda s: s.name)
def test_one_rank_ended_at_every_instant(alone: Runs, scenario: Scenario) -> None:
    instants = _instants(alone, scenario, 0)
    assert len(instants) > 5
    for at in range(len(instants)):
        if not instants[at].startswith(scenario.skips):
            _end_at(alone, scenario, 0, at, instants)


@pytest.fixture(scope="module")
def pair(zygote: Zygote, memory: Path) -> Runs:
    return Runs(zygote, memory / "pair", 2)


@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_ended_while_they_write_and_publish(pair: Runs, rank: int) -> None:
    """All of rank 1's instants; of rank 0's those from its last file to ``latest``, at which the
    other matters.
    """
    scenario = Scenario("save", saves=1)
    instants = _instants(pair, scenario, rank)
    first = instants.index("write step_4.tmp/manifest.json") - 1 if rank == 0 else 0
    last = instants.index("rename latest.tmp to latest") + 2 if rank == 0 else len(instants)
    for at in range(first, last):
        _end_at(pair, scenario, rank, at, instants)


def test_who_only_looks_at_an_older_one_leaves_the_newer_ones(alone: Runs) -> None:
    where = alone.copy()
    root = where / "run" / commit.FOLDER
    looks = {"resume_mode": "path", "resume_from_path": str(root / "step_2"), "going_on": False}
    assert alone.live(where, resume=looks).restored == 2
    assert {p.name for p in root.iterdir()} == {"step_2", "step_3", commit.LATEST}
    assert alone.live(where, saves=1).restored == 3


def _instants(runs: Runs, scenario: Scenario, rank: int) -> list[str]:
    """Of an undisturbed life."""
    where = runs.copy()
    scenario.prepare(where)
    return runs.live(where, saves=scenario.saves, resume=scenario.resume, crash=(rank, -1)).instants


def _end_at(runs: Runs, scenario: Scenario, rank: int, at: int, instants: list[str]) -> None:
    where, told = runs.copy(), f"{scenario.name}: rank {rank} ended at {at}: {instants[at]}"
    root = where / "run" / commit.FOLDER
    scenario.prepare(where)
    ended = runs.live(where, saves=scenario.saves, resume=scenario.resume, crash=(rank, at))
    assert ended.killed and ended.instants == instants[: at + 1], told
    done = instants[:at]
    if (named := root / commit.LATEST).exists():
        assert manifest.read(root / named.read_text().strip()), told
    if scenario.name == "save":
        _elsewhere(where, 3 + ("upload half of step_4/manifest.json" in done), told)
    expected = scenario.expected(done)
    after = runs.live(where, saves=1, resume=scenario.resume)
    assert after.restored == expected, f"{told}: restored {after.restored}"
    names = {p.name for p in root.iterdir()}
    kept = {f"step_{expected}", f"step_{expected + 1}"}
    assert kept | {commit.LATEST} <= names, f"{told}: {names}"
    assert {n for n in names - kept if n != commit.LATEST} <= scenario.leaves, f"{told}: {names}"
    assert (root / commit.LATEST).read_text() == f"step_{expected + 1}\n", told
    for name in kept:
        assert manifest.problems(root / name, manifest.read(root / name)) == [], told
    shutil.rmtree(where)


def _elsewhere(where: Path, step: int, told: str) -> None:
    """A machine with an empty run folder gets ``step`` from the mirror: a half upload is never
    taken.
    """
    root = where / "elsewhere"
    root.mkdir()
    got = fetch_newer(Mirror(f"file://{where}/mirror"), root, Disk(), "1-ab")
    assert got == root / f"step_{step}", f"{told}: the mirror gave {got}"
