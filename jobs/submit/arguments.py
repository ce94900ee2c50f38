"""Further arguments of sbatch and srun, in all forms that Slurm takes: ``-A x``, ``-Ax``,
``--account x``, ``--account=x``, ``--exclusive``. Pure.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from trainer.base.errors import UserError

SHORT = {
    "A": "account",
    "B": "extra-node-info",
    "C": "constraint",
    "D": "chdir",
    "F": "nodefile",
    "G": "gpus",
    "J": "job-name",
    "L": "licenses",
    "M": "clusters",
    "N": "nodes",
    "S": "core-spec",
    "a": "array",
    "b": "begin",
    "c": "cpus-per-task",
    "d": "dependency",
    "e": "error",
    "i": "input",
    "m": "distribution",
    "n": "ntasks",
    "o": "output",
    "p": "partition",
    "q": "qos",
    "t": "time",
    "w": "nodelist",
    "x": "exclude",
}
"""Short options of sbatch and srun that take a value."""
SHORT_FLAGS = {
    "H": "hold",
    "K": "kill-on-bad-exit",
    "O": "overcommit",
    "Q": "quiet",
    "W": "wait",
    "k": "no-kill",
    "l": "label",
    "s": "oversubscribe",
    "u": "unbuffered",
    "v": "verbose",
}
"""Short options without a value."""
FLAGS = frozenset(SHORT_FLAGS.values()) - {"kill-on-bad-exit", "wait"} | {
    *("contiguous", "exclusive", "ignore-pbs", "no-requeue", "parsable", "reboot", "requeue"),
    *("spread-job", "test-only", "use-min-nodes", "overlap", "exact", "multi-prog", "pty"),
}
"""Long options that take no value in a word of its own (``--exclusive user`` is two arguments)."""

SWEEP = "leave it out: a sweep is submitted as arrays"
ENDING = "leave it out: the batch script and python -m jobs need its output"
GPUS = "set trainer.n_gpus_per_node and cluster.gpu_style, or hydra.launcher.gres"
RANKS = "set trainer.n_gpus_per_node: every rank is a task"
MEMORY = "set cluster.mem_gb or hydra.launcher.mem_gb"
OWN_KEY = {
    "account": "set cluster.account or hydra.launcher.account",
    "array": SWEEP,
    "clusters": "set SLURM_CLUSTERS in the shell that submits",
    "comment": "set hydra.launcher.comment",
    "constraint": "set hydra.launcher.constraint",
    "cpus-per-gpu": "set hydra.launcher.cpus_per_gpu",
    "cpus-per-task": "set cluster.cpus_per_task or hydra.launcher.cpus_per_task",
    "dependency": "set hydra.launcher.dependency",
    "error": ENDING,
    "exclude": "set hydra.launcher.exclude",
    "exclusive": "set hydra.launcher.exclusive",
    "export": "name variables in cluster.env",
    "export-file": "name variables in cluster.env",
    "gpus": GPUS,
    "gpus-per-node": GPUS,
    "gpus-per-socket": GPUS,
    "gpus-per-task": GPUS,
    "gres": GPUS,
    "job-name": "set hydra.launcher.name",
    "mail-type": "set hydra.launcher.mail_type",
    "mail-user": "set hydra.launcher.mail_user",
    "mem": MEMORY,
    "mem-per-cpu": "set hydra.launcher.mem_per_cpu",
    "mem-per-gpu": "set hydra.launcher.mem_per_gpu",
    "no-requeue": "set hydra.launcher.max_num_timeout, max_preemptions and max_node_failures to 0",
    "nodelist": "set hydra.launcher.nodelist",
    "nodes": "set trainer.nnodes",
    "ntasks": RANKS,
    "ntasks-per-gpu": RANKS,
    "ntasks-per-node": RANKS,
    "open-mode": ENDING,
    "output": ENDING,
    "parsable": ENDING,
    "partition": "set cluster.partition or hydra.launcher.partition",
    "qos": "set cluster.qos or hydra.launcher.qos",
    "quiet": ENDING,
    "requeue": "leave it out: jobs are queued again as hydra.launcher.max_* say",
    "signal": "set hydra.launcher.signal_delay_s",
    "test-only": "set hydra.launcher.check=true",
    "time": "set hydra.launcher.timeout_min",
    "time-min": "set hydra.launcher.timeout_min",
    "wait": "set hydra.launcher.wait=true",
    "wckey": "set hydra.launcher.wckey",
    "wrap": "leave it out: the job is the trainer",
}
"""Long option of sbatch -> what to type instead, where a setting has it."""
NEVER = frozenset(
    {
        "array",
        "clusters",
        "error",
        "export",
        "export-file",
        "gpus-per-socket",
        "no-requeue",
        "nodes",
        "ntasks",
        "ntasks-per-gpu",
        "ntasks-per-node",
        "open-mode",
        "output",
        "parsable",
        "partition",
        "quiet",
        "requeue",
        "signal",
        "test-only",
        "time",
        "time-min",
        "wait",
        "wrap",
    }
)
"""Options that every plan sets, or that would break it; others only clash with a set key."""
KINDS = (
    frozenset(("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket")),
    frozenset(("mem", "mem-per-cpu", "mem-per-gpu")),
)
"""Options that exclude one another."""
SRUN_OWN = {
    "error": ENDING,
    "export": "name variables in cluster.env",
    "input": "leave it out: the trainer reads no input",
    "kill-on-bad-exit": "leave it out: all ranks end together",
    "multi-prog": "leave it out: the job is the trainer",
    "nodes": "set trainer.nnodes",
    "ntasks": RANKS,
    "ntasks-per-node": RANKS,
    "open-mode": ENDING,
    "output": ENDING,
    "partition": "set cluster.partition",
    "pty": "leave it out: the trainer has no terminal",
    "quit-on-interrupt": "leave it out: python -m jobs cancel stops a job",
    "time": "set hydra.launcher.timeout_min",
    "unbuffered": "leave it out: it is set",
    "wait": "leave it out: all ranks end together",
}
"""Options of srun that the batch script sets, or that would break it -> what to type instead."""
CONTAINER = "set container.runtime=pyxis and the keys of container"


@dataclass(frozen=True)
class Argument:
    """One argument of sbatch or srun."""

    name: str
    """The long option, without its dashes."""
    value: str | None
    """None for a flag."""
    text: str
    """As the user wrote it."""


def parse(text: str, key: str) -> Argument:
    """The argument that ``text`` is.

    Raises UserError, which names ``key``, when it is not exactly one.
    """
    words = _words(text, key)
    if not words or not re.fullmatch(r"-[A-Za-z].*|--[A-Za-z][\w-]+(=.*)?", words[0], re.DOTALL):
        raise UserError(
            f"{key}: {text!r} is not one argument; write e.g. '--reservation=x', '-C gpu' or "
            "'--exclusive'."
        )
    if len(words) > 2:
        raise UserError(f"{key}: {text!r} is {len(words)} words; write one argument per item.")
    name, value = _split(words[0], text, key)
    if len(words) == 2:
        if value is not None or name in FLAGS:
            raise UserError(
                f"{key}: {words[1]!r} does not belong to {words[0]!r}; write it as an item of its "
                "own."
            )
        value = words[1]
    return Argument(name, value, text)


def _words(text: str, key: str) -> list[str]:
    if not text.isprintable():
        raise UserError(f"{key}: {text!r} is not one argument; write it on one line.")
    try:
        return shlex.split(text)
    except ValueError as error:
        raise UserError(f"{key}: {text!r} has an open quote ({error}).") from error


def _split(word: str, text: str, key: str) -> tuple[str, str | None]:
    """Long name and value of the first word."""
    if word.startswith("--"):
        name, equals, value = word[2:].partition("=")
        return name.replace("_", "-"), value if equals else None
    letter, rest = word[1], word[2:]
    if letter in SHORT:
        return SHORT[letter], rest.removeprefix("=") or None
    if letter in SHORT_FLAGS and not rest:
        return SHORT_FLAGS[letter], None
    raise UserError(f"{key}: {text!r} is no option of Slurm; write its long form, --NAME=VALUE.")


def sbatch_parameters(arguments: Iterable[str], key: str) -> dict[str, Any]:
    """Long option -> value, True for a flag, as Submitit takes them. Raises UserError."""
    parameters: dict[str, Any] = {}
    for text in arguments:
        one = parse(text, key)
        if one.value is None and one.name in SHORT.values():
            raise UserError(f"{key}: {text!r} needs a value; write '--{one.name}=VALUE'.")
        parameters[one.name] = True if one.value is None else one.value
    return parameters


def mapped_parameters(values: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The same from a mapping ``{reservation: x, exclusive: true}``. Raises UserError."""
    parameters: dict[str, Any] = {}
    for name, value in values.items():
        long = SHORT.get(name) or SHORT_FLAGS.get(name) or name.lstrip("-").replace("_", "-")
        if not re.fullmatch(r"[A-Za-z][\w-]+", long):
            raise UserError(f"{key}: {name!r} is no option of sbatch; write {{reservation: x}}.")
        scalar = isinstance(value, str | int | float) and value is not False
        if not scalar or not str(value).isprintable():
            raise UserError(
                f"{key}: {name}={value!r} must be a text, a number, or true for a flag; leave out "
                "what is not wanted."
            )
        parameters[long] = value
    return parameters


def clashes(extra: Mapping[str, Any], planned: Iterable[str], key: str) -> list[str]:
    """A message for each further argument that contradicts what the plan sets (``planned``: long
    options), or that a plan can't have.
    """
    taken = set(planned)
    for kind in KINDS:
        if taken & kind:
            taken |= kind
    return [
        f"{key}: --{name} is set by the plan; {OWN_KEY.get(name, 'leave it out')}."
        for name in extra
        if name in NEVER or name in taken
    ]


def srun_words(arguments: Iterable[str]) -> list[str]:
    """The words of further arguments of srun: ``["--cpu-bind cores"]`` is two."""
    return [word for text in arguments for word in shlex.split(text)]


def srun_problems(arguments: Iterable[str], key: str) -> list[str]:
    """A message for each argument of srun that the batch script sets itself, or that is none.

    A value may be an item of its own, as in ``[--mpi, none]``.
    """
    problems = []
    for text in arguments:
        try:
            words = _words(text, key)
            name = _split(words[0], text, key)[0] if words and words[0].startswith("-") else ""
        except UserError as error:
            problems.append(str(error))
            continue
        container = CONTAINER if name.startswith("container-") else None
        instead = SRUN_OWN.get(name, container)
        if instead is not None:
            problems.append(f"{key}: --{name} is set by the batch script; {instead}.")
    return problems
