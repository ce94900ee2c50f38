"""The image's %test: every locked package is there in its locked version, what ranks import can be
imported, and the tools that DeepSpeed compiles its operators with are on PATH. ``check.py LOCKED``:
exit code 1 with all that is wrong.
"""

from __future__ import annotations

import importlib
import re
import shutil
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

IMPORTED = (
    "torch",
    "deepspeed",
    "transformers",
    "vllm",
    "submitit",
    "pydantic",
    "omegaconf",
    "wandb",
)
TOOLS = ("g++", "ninja", "nvcc")


def pins(text: str) -> dict[str, str]:
    """``name==version`` lines of a locked set; markers and comments are left out."""
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^\s;#]+)", text, flags=re.MULTILINE))


def problems(
    locked: Path, imported: Sequence[str] = IMPORTED, tools: Sequence[str] = TOOLS
) -> list[str]:
    """All that is wrong with this interpreter's packages; empty when the image is good."""
    versions = pins(locked.read_text())
    problems_found: list[str] = []
    for name, version in versions.items():
        try:
            installed = metadata.version(name)
        except metadata.PackageNotFoundError:
            installed = "not installed"
        if installed.partition("+")[0] != version.partition("+")[0]:
            problems_found.append(f"{name}: {installed}, locked is {version}")
    for name in imported:
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a broken package raises is worth a line
            problems_found.append(f"import {name}: {type(error).__name__}: {error}")
    torch = sys.modules.get("torch") if "torch" in imported else None
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    runtime = versions.get("nvidia-cuda-runtime", "")
    if torch is not None and (not cuda or cuda.split(".")[0] != runtime.split(".")[0]):
        problems_found.append(
            f"torch is built for CUDA {cuda}, locked is the runtime {runtime or 'of none'}"
        )
    return problems_found + [
        f"{tool} is not on PATH" for tool in tools if shutil.which(tool) is None
    ]


if __name__ == "__main__":
    wrong = problems(Path(sys.argv[1]))
    sys.stdout.write(
        "".join(f"{line}\n" for line in wrong)
        or f"ok: {sys.version.split()[0]}, all locked packages\n"
    )
    sys.exit(1 if wrong else 0)
