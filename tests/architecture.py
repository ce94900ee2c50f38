"""The packages of the project: what each holds and may import.

``python -m tests.architecture`` prints the table that docs/design.md shows.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("trainer", "jobs", "hydra_plugins", "containers", "benchmarks")
"""Top-level folders with Python code, tests apart."""

BASE = "trainer/base"
CONFIG = "trainer/config"
BATCHING = "trainer/batching"
ALGORITHMS = "trainer/algorithms"
RANKS = "trainer/ranks"
DATA = "trainer/data"
MODELS = "trainer/models"
PARALLEL = "trainer/parallel"
CHECKPOINT = "trainer/checkpoint"
TRACKING = "trainer/tracking"
REWARDS = "trainer/rewards"
LAUNCH = "trainer/launch"
PLAN = "trainer/plan"
ROLLOUT = "trainer/rollout"
EXPERIENCE = "trainer/experience"
UPDATE = "trainer/update"
RUN = "trainer/run"


@dataclass(frozen=True)
class Package:
    """A row of the table."""

    name: str
    """Folder or file, relative to the repository."""
    holds: str
    may_import: tuple[str, ...]
    """Packages that its files may import, inside functions too."""
    torch: bool
    """Whether importing it may load torch."""


PACKAGES = (
    Package(BASE, "errors, signals, environment, small files shared by all", (), torch=False),
    Package(
        CONFIG,
        "typed schema, one validation pass, batch algebra, the frozen config",
        (BASE,),
        torch=False,
    ),
    Package(
        BATCHING,
        "sequence lengths in, plan of micro-batches out; numpy, and numba if installed",
        (BASE,),
        torch=False,
    ),
    Package(ALGORITHMS, "advantages, losses, KL, schedules: pure tensor functions", (), torch=True),
    Package(
        LAUNCH,
        "the processes of a machine and a job's rollout nodes: start, watch, end together",
        (BASE, CONFIG),
        torch=False,
    ),
    Package(RANKS, "process groups, rendezvous, agreement of ranks", (BASE,), torch=True),
    Package(DATA, "readers, sample checks, resumable loader, `Batch`", (BASE, CONFIG), torch=True),
    Package(
        MODELS,
        "loading, ragged forward, attention backends, log-probs, LoRA",
        (BASE, CONFIG, DATA),
        torch=True,
    ),
    Package(
        PARALLEL,
        "DeepSpeed engine, exchange of ragged columns between ranks",
        (BASE, CONFIG, DATA, MODELS, RANKS),
        torch=True,
    ),
    Package(
        CHECKPOINT,
        "snapshot, writer process, commit protocol, restore, retention",
        (BASE, CONFIG, RANKS),
        torch=True,
    ),
    Package(
        TRACKING,
        "metrics, timers, W&B, progress, pictures",
        (BASE, BATCHING, CONFIG),
        torch=True,
    ),
    Package(
        REWARDS,
        "rule rewards, user functions, processes that bound their time",
        (BASE, CONFIG, DATA),
        torch=True,
    ),
    Package(
        PLAN,
        "`python -m trainer.plan`: batch algebra, memory, checkpoint time",
        (BASE, BATCHING, CONFIG, MODELS),
        torch=False,
    ),
    Package(
        ROLLOUT,
        "rollout engines (hf, vLLM in process and as servers), agents and turns",
        (BASE, CONFIG, DATA, LAUNCH, MODELS, RANKS),
        torch=True,
    ),
    Package(
        EXPERIENCE,
        "how a batch comes about: prompts, rollouts, rewards, weight sync",
        (BASE, CONFIG, DATA, MODELS, PARALLEL, RANKS, REWARDS, ROLLOUT, TRACKING),
        torch=True,
    ),
    Package(
        UPDATE,
        "how a batch is learnt from: micro-batches, losses, the optimizer step",
        (ALGORITHMS, BASE, BATCHING, CONFIG, DATA, MODELS, PARALLEL, RANKS),
        torch=True,
    ),
    Package(
        RUN,
        "the life of a run: build, training step, validation, checkpoints, end",
        (
            *(ALGORITHMS, BASE, BATCHING, CHECKPOINT, CONFIG, DATA, EXPERIENCE, LAUNCH, MODELS),
            *(PARALLEL, PLAN, RANKS, REWARDS, ROLLOUT, TRACKING, UPDATE),
        ),
        torch=True,
    ),
    Package(
        "trainer/worker.py", "one rank of a run", (BASE, CONFIG, LAUNCH, ROLLOUT, RUN), torch=False
    ),
    Package(
        "trainer/__main__.py", "`python -m trainer`", (BASE, CONFIG, LAUNCH, "jobs"), torch=False
    ),
    Package(
        "trainer/export.py",
        "`python -m trainer.export`: a checkpoint as a Hugging Face folder",
        (BASE, CHECKPOINT, CONFIG, MODELS),
        torch=True,
    ),
    Package(
        "jobs",
        "the login node: sweeps, batch scripts, requeue, ledger, `python -m jobs`",
        (BASE, CONFIG, LAUNCH, PLAN),
        torch=False,
    ),
    Package("hydra_plugins", "the Hydra launcher", ("jobs",), torch=False),
    Package("containers", "image definition, its build and check", (), torch=False),
    Package(
        "benchmarks",
        "one table and one JSON file each",
        (
            *(ALGORITHMS, BASE, BATCHING, CHECKPOINT, CONFIG, DATA, EXPERIENCE, LAUNCH, MODELS),
            *(PARALLEL, PLAN, RANKS, REWARDS, ROLLOUT, RUN, TRACKING, UPDATE),
        ),
        torch=True,
    ),
)

Graph = Mapping[str, set[str]]
"""Name -> names that it imports."""


def source_files() -> list[str]:
    """All Python files outside tests, relative to the repository."""
    paths = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    return sorted(str(path.relative_to(ROOT)) for path in paths)


def package_of(file: str) -> str:
    """The package that holds ``file``."""
    folders = file.split("/")
    if folders[0] == "trainer" and len(folders) > 2:
        return "/".join(folders[:2])
    return file if folders[0] == "trainer" else folders[0]


def imports_of_files() -> dict[str, set[str]]:
    """File -> files of the project that it imports, inside functions too."""
    files = set(source_files())
    return {file: set(_imported_files(file, files)) - {file} for file in files}


def imports_of_packages(files: Graph) -> dict[str, set[str]]:
    """Package -> other packages that its files import."""
    packages: dict[str, set[str]] = {}
    for file, imported in files.items():
        package = package_of(file)
        others = {package_of(other) for other in imported} - {package}
        packages.setdefault(package, set()).update(others)
    return packages


def circles(graph: Graph) -> list[list[str]]:
    """Groups of two or more names that import each other (Tarjan's strong components)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in graph.get(name, ()):
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] != index[name]:
            return
        group = [stack.pop()]
        while group[-1] != name:
            group.append(stack.pop())
        if len(group) > 1:
            found.append(sorted(group))

    for name in graph:
        if name not in index:
            visit(name)
    return sorted(found)


def table(packages: Iterable[Package] = PACKAGES) -> str:
    """The table of docs/design.md."""
    lines = ["| package | holds | may import | torch |", "|---|---|---|---|"]
    for package in packages:
        imported = ", ".join(name.removeprefix("trainer/") for name in sorted(package.may_import))
        lines.append(
            f"| `{package.name}` | {package.holds} | {imported} | "
            f"{'yes' if package.torch else 'no'} |"
        )
    return "\n".join(lines) + "\n"


def _imported_files(file: str, files: set[str]) -> Iterator[str]:
    for node in ast.walk(ast.parse((ROOT / file).read_text())):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            target = _file_of(name, files)
            if target is not None:
                yield target


def _file_of(name: str, files: set[str]) -> str | None:
    """The file of a dotted module, or of the module that a dotted name is imported from."""
    parts = name.split(".")
    for length in (len(parts), len(parts) - 1):
        path = "/".join(parts[:length])
        for candidate in (f"{path}.py", f"{path}/__init__.py"):
            if candidate in files:
                return candidate
    return None


if __name__ == "__main__":
    sys.stdout.write(table())
