"""Where a rank runs: in this interpreter, in an Apptainer image, or in a pyxis/enroot container.

Each runtime is a way to write ``task.sh``, the script that starts one process of a run and replaces
itself by it.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jobs.submit.shape import Shape

ALLOWED = (
    "SLURM_",
    "SLURMD_",
    "SUBMITIT_",
    "PLIMSOLL_",
    "PMI",
    "MASTER_",
    "NCCL_",
    "GLOO_",
    "UCX_",
    "FI_",
    "CUDA_",
    "NVIDIA_",
    "HF_",
    "WANDB_",
    "TRITON_",
    "TORCH",
    "OMP_",
    "MKL_",
    "VLLM_",
    "TOKENIZERS_",
    "TRANSFORMERS_",
    "HYDRA_FULL_ERROR",
    "XDG_CACHE_HOME",
    "PYTHONNOUSERSITE",
    "PYTHONSAFEPATH",
    "LANG",
    "LC_",
    "TZ",
)
"""Beginnings of names of environment variables that a rank sees in an image. Values never reach a
command line.
"""

CACHES = ("PLIMSOLL_CACHE", "HF_HOME", "TRITON_CACHE_DIR", "TORCH_EXTENSIONS_DIR", "XDG_CACHE_HOME")
"""Variables that name caches. An image has no home: what is not set lies in the sweep's own
``cache`` folder.
"""

HOLD = "env --block-signal=USR2 --block-signal=TERM"
"""Signals that come before the trainer has a handler wait for it, instead of killing the
process.
"""


@dataclass(frozen=True, kw_only=True)
class Place:
    """The folders of one batch of jobs that its processes need."""

    folder: Path
    """Scripts and pickles of the batch."""
    code: Path
    """The snapshot of the code."""
    binds: tuple[str, ...] = ()
    """``source[:target[:ro]]``: what the jobs' configs name, see :func:`binds_of`."""


def interpreter(shape: Shape, here: str) -> str:
    """The Python that runs a rank: ``here`` (this one) without an image, else the image's."""
    return shape.container.python or (here if shape.container.runtime == "none" else "python3")


def task_script(shape: Shape, place: Place) -> str:
    """``task.sh COMMAND ...``: run COMMAND as one process of the run. Golden-file tested for every
    runtime.
    """
    head = "#!/bin/bash\n# One process of a run. exec all the way: Slurm's signals must reach Python itself.\n"
    hold = f'hold="{HOLD}"; $hold true 2>/dev/null || hold=""   # coreutils before 8.31 cannot\n'
    runtime = shape.container.runtime
    if runtime == "none":
        return (
            head
            + hold
            + f"export PYTHONPATH={_q(place.code)}${{PYTHONPATH:+:$PYTHONPATH}}\n"
            + 'exec $hold "$@"\n'
        )
    if runtime == "pyxis":
        return (
            head
            + _caches(place)
            + hold
            + f"export PYTHONPATH={_q(place.code)}\n"
            + 'exec $hold "$@"\n'
        )
    names = "|".join([*ALLOWED, *(f"{name}$" for name in shape.cluster.env)])
    lines = [
        f"allowed='^({names})'",
        "for name in $(compgen -e); do",
        '  [[ $name =~ $allowed ]] && export "APPTAINERENV_$name=${!name}"',
        "done",
        f"export APPTAINERENV_PYTHONPATH={_q(place.code)}",
    ]
    command = [
        "exec",
        "apptainer",
        "--silent",
        "exec",
        "--cleanenv",
        "--no-home",
        "--no-mount",
        "home,cwd",
    ]
    command += ["--nv"] if shape.gpus_per_node else []
    for bind in _all_binds(shape, place):
        command += ["--bind", _q(bind)]
    command += [
        "--pwd",
        '"$PLIMSOLL_RUN"',
        *(_q(arg) for arg in shape.container.args),
        _q(shape.container.image or ""),
    ]
    return head + _caches(place) + "\n".join(lines) + "\n" + " ".join(command) + f' {HOLD} "$@"\n'


def _caches(place: Place) -> str:
    where = _q(place.code.parent / "cache")
    return f'for name in {" ".join(CACHES)}; do [ -n "${{!name}}" ] || export "$name="{where}/"$name"; done\n'


def srun_flags(shape: Shape, place: Place) -> list[str]:
    """What srun itself must be told to open the container (pyxis); empty for the other runtimes.
    Shell-quoted.
    """
    if shape.container.runtime != "pyxis":
        return []
    mounts = ",".join(_pyxis_mount(bind) for bind in _all_binds(shape, place))
    return [
        f"--container-image={_q(shape.container.image or '')}",
        f"--container-mounts={_q(mounts)}",
        '--container-workdir="$RUN"',
        "--no-container-mount-home",
        f"--container-env={','.join(CACHES)},PYTHONNOUSERSITE,PYTHONSAFEPATH,CUDA_VISIBLE_DEVICES",
    ]


def binds_of(configs: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Folders of all paths in the configs that exist here (of a file: its folder), none inside
    another.
    """
    folders = {found for config in configs for text in _strings(config) for found in _folder(text)}
    kept: list[Path] = []
    for path in sorted(folders, key=lambda p: len(p.parts)):
        if not any(path == outer or outer in path.parents for outer in kept):
            kept.append(path)
    return tuple(sorted(str(path) for path in kept))


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


def _all_binds(shape: Shape, place: Place) -> list[str]:
    """Code last and read-only: it lies inside the sweep folder, which is bound for writing."""
    return [*shape.container.binds, *place.binds, f"{place.code}:{place.code}:ro"]


def _pyxis_mount(bind: str) -> str:
    parts = bind.split(":")
    return ":".join([parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:]])


def _q(text: object) -> str:
    return shlex.quote(str(text))
