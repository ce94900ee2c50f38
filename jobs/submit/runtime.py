"""Where a rank runs: in this interpreter, in an Apptainer image, or in a pyxis/enroot container.

Each runtime has its form of ``task.sh``, the script that starts one process of a run and replaces
itself by it.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from jobs.environment import EVERYWHERE, OF_THE_JOB
from jobs.submit.binds import CACHES
from jobs.submit.shape import Shape

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
    """``source[:target[:ro]]``: what the jobs' configs name, see :mod:`jobs.submit.binds`."""
    hf_home: str | None = None
    """Hugging Face's folder of the submitting shell; None when it has none."""


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
    """Put the caches that are not set, or not there, into the sweep's folder; Hugging Face's stays
    where the submitting user has it.
    """
    hub = ""
    if paths.hf_home is not None:
        hub = f'[ -d "$HF_HOME" ] || export HF_HOME={_quote(paths.hf_home)}\n'
    folder = _quote(paths.cache)
    return hub + (
        f"for name in {' '.join(CACHES)}; do "
        f'[ -d "${{!name}}" ] || export "$name="{folder}/"$name"; done\n'
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


def _all_binds(shape: Shape, paths: BatchPaths) -> list[str]:
    """All binds; the code last and read-only, since it lies in the writable sweep folder."""
    return [*shape.container.binds, *paths.binds, f"{paths.code}:{paths.code}:ro"]


def _pyxis_mount(bind: str) -> str:
    parts = bind.split(":")
    return ":".join([parts[0], parts[1] if len(parts) > 1 else parts[0], *parts[2:]])


def _quote(text: object) -> str:
    return shlex.quote(str(text))
