"""Where a rank runs: in this interpreter, in an Apptainer image, or in a pyxis/enroot container.

Each runtime has its form of ``task.sh``, the script that starts one process of a run and replaces
itself by it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.environment import EVERYWHERE, OF_THE_JOB
from jobs.submit.shape import Shape

CACHES = ("PLIMSOLL_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
"""Variables that name caches. An image has no home, so those not set point into the sweep's folder
``cache``.
"""

HEAD = (
    "#!/bin/bash\n"
    "# One process of a run. exec all the way: Slurm's signals must reach Python itself.\n"
)
HOLD = "env --block-signal=USR2 --block-signal=TERM"
"""Signals wait until the trainer has a handler, instead of killing the process."""


@dataclass(frozen=True, kw_only=True)
class BatchPaths:
    """The folders of one batch of jobs that its processes need."""

    folder: Path
    """Scripts and pickles of the batch."""
    code: Path
    """The snapshot of the code."""
    cache: Path
    """For the caches of an image that the submitting shell does not place."""
    binds: tuple[str, ...] = ()
    """``source[:target[:ro]]``: what the jobs' configs name, see :func:`binds_of`."""


def rank_python(shape: Shape, interpreter: str) -> str:
    """The Python that runs a rank: ``interpreter`` (this one), or with an image the image's."""
    return shape.container.python or (
        interpreter if shape.container.runtime == "none" else "python3"
    )


def task_script(shape: Shape, paths: BatchPaths) -> str:
    """``task.sh COMMAND ...``: run COMMAND as one process of the run."""
    runtime = shape.container.runtime
    if runtime == "apptainer":
        return HEAD + _caches(paths) + _apptainer(shape, paths)
    code = _quote(paths.code)
    hold = f'hold="{HOLD}"; $hold true 2>/dev/null || hold=""   # coreutils before 8.31 cannot\n'
    if runtime == "none":
        path = f"export PYTHONPATH={code}${{PYTHONPATH:+:$PYTHONPATH}}\n"
        return HEAD + hold + path + 'exec $hold "$@"\n'
    path = f"export PYTHONPATH={code}\n"
    return HEAD + _caches(paths) + hold + path + 'exec $hold "$@"\n'


def _apptainer(shape: Shape, paths: BatchPaths) -> str:
    """Hand the allowed variables to the image, and start the command in it. Values never reach a
    command line.
    """
    patterns = (*OF_THE_JOB, *EVERYWHERE, *shape.cluster.env)
    names = "|".join(one[:-1] if one.endswith("*") else f"{one}$" for one in patterns)
    lines = [
        f"allowed='^({names})'",
        "for name in $(compgen -e); do",
        '  [[ $name =~ $allowed ]] && export "APPTAINERENV_$name=${!name}"',
        "done",
        f"export APPTAINERENV_PYTHONPATH={_quote(paths.code)}",
    ]
    command = ["exec apptainer --silent exec --cleanenv --no-home --no-mount home,cwd"]
    if shape.gpus_per_node:
        command.append("--nv")
    for bind in _all_binds(shape, paths):
        command += ["--bind", _quote(bind)]
    command += ["--pwd", '"$PLIMSOLL_RUN"']
    command += [_quote(arg) for arg in shape.container.args]
    command += [_quote(shape.container.image or ""), HOLD, '"$@"']
    return "\n".join([*lines, " ".join(command)]) + "\n"


def _caches(paths: BatchPaths) -> str:
    """Put the caches that are not set into the sweep's folder."""
    folder = _quote(paths.cache)
    return (
        f"for name in {' '.join(CACHES)}; do "
        f'[ -n "${{!name}}" ] || export "$name="{folder}/"$name"; done\n'
    )


def srun_flags(shape: Shape, paths: BatchPaths) -> list[str]:
    """Flags with which srun opens the container (pyxis), shell-quoted; empty for other runtimes."""
    if shape.container.runtime != "pyxis":
        return []
    mounts = ",".join(_pyxis_mount(bind) for bind in _all_binds(shape, paths))
    return [
        f"--container-image={_quote(shape.container.image or '')}",
        f"--container-mounts={_quote(mounts)}",
        '--container-workdir="$RUN"',
        "--no-container-mount-home",
        f"--container-env={','.join(CACHES)},PYTHONNOUSERSITE,PYTHONSAFEPATH,CUDA_VISIBLE_DEVICES",
    ]


def binds_of(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Folders of all paths in the configs that exist here, none inside another."""
    folders = {
        folder for config in configs for text in _strings(config) for folder in _folder(text)
    }
    outermost: list[Path] = []
    for path in sorted(folders, key=lambda p: len(p.parts)):
        if not any(path == outer or outer in path.parents for outer in outermost):
            outermost.append(path)
    return tuple(sorted(str(path) for path in outermost))


def _strings(value: Any) -> Iterable[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            if key not in ("cluster", "container"):
                yield from _strings(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _strings(inner)


def _folder(text: str) -> Iterable[Path]:
    if "/" in text.strip("/") and len(text) < 4096 and not set(text) & set("\n:,"):
        path = Path(os.path.abspath(os.path.expanduser(text.split("*")[0])))
        if path.is_dir():
            yield path
        elif path.exists():
            yield path.parent


def _all_binds(shape: Shape, paths: BatchPaths) -> list[str]:
    """All binds; the code last and read-only, since it lies in the writable sweep folder."""
    return [*shape.container.binds, *paths.binds, f"{paths.code}:{paths.code}:ro"]


def _pyxis_mount(bind: str) -> str:
    parts = bind.split(":")
    return ":".join([parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:]])


def _quote(text: object) -> str:
    return shlex.quote(str(text))
