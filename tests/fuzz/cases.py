"""Seeded command lines: every key of the schema and of the launchers with hostile values."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from dataclasses import dataclass

from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.options import SlurmOptions
from trainer.config.keys.fields import setting_keys
from trainer.plan.options import PlanOptions

BASE = ("data=arithmetic", "model=tiny", "actor_rollout_ref.rollout.n=8")
JOBS = (*BASE, "-m", "cluster=dev", "cluster.local_folders=[]", "hydra.launcher.dry_run=true")
NUMBERS = ("nan", "inf", "-inf", "1e300", "-1e300", "1" + "0" * 23, "-1" + "0" * 23)
"""Never a number that a setting may have."""
VALUES = (
    *NUMBERS,
    *("-1", "0", "''", "null", "[]", "{}", "[1,2]", "{a:1}", "true", "1_000", "0x10", "???"),
    *("'a\nb'", "'a\x1b[2Jb'", "é日本語", "\udcff", "x" * 10_000, "'" + "y" * 300 + "'"),
    *("${trainer.seed}", "${no.such.key}", "${oc.env:PLIMSOLL_NO_SUCH}", "${oc.env:HOME}"),
    *("${trainer}", "${now:%Y}", "${", "}", "'", '"', "=", "a=b", "%s%n", "../..", "/", "~"),
    "/dev/null",
    *("[" * 400 + "]" * 400, "[" * 4000, "{a:{b:{c:[1,{d:2}]}}}", "9" * 5000, "[null]", "\t", " "),
    "${SELF}",
)  # fmt: skip


@dataclass(frozen=True)
class Case:
    """A command line, and what its message must name when it is refused."""

    command: str
    argv: tuple[str, ...]
    names: str = ""
    refused: bool = False
    """Whether it may not be accepted."""


def all_command_lines() -> Iterator[Case]:
    """Every key with every value."""
    numbers = _number_keys()
    for key in setting_keys():
        for value in VALUES:
            text = f"{key}={value.replace('SELF', key)}"
            refused = value in NUMBERS and key in numbers
            yield Case("trainer", (*BASE, text), key, refused)
    for name in [f"hydra.launcher.{f.name}" for f in dataclasses.fields(SlurmOptions)] + [
        "hydra.sweep.dir",
        "hydra.sweeper.params",
    ]:
        for value in VALUES:
            if name != "hydra.launcher._target_":
                text = f"{name}={value.replace('SELF', name)}"
                yield Case("trainer", (*JOBS, text), name.replace("hydra.sweep.dir", ""))
    for group, kind in (("cluster", Cluster), ("container", Container)):
        for one in dataclasses.fields(kind):
            for value in VALUES:
                name = f"{group}.{one.name}"
                text = f"++{name}={value.replace('SELF', name)}"
                yield Case("trainer", (*JOBS, "container=none", text), one.name)
    for option in dataclasses.fields(PlanOptions):
        for value in VALUES:
            yield Case(
                "plan", (*BASE, f"plan.{option.name}={value}"), option.name, value in NUMBERS
            )
    for words in _words_of_jobs():
        yield Case("jobs", words)


def _words_of_jobs() -> Iterator[tuple[str, ...]]:
    odd = ("", "x" * 5000, "\udcff", "../..", "a/b/c", "-1", "1" + "0" * 23, "nan", "\n", "[1]")
    for command in ("status", "logs", "cancel", "resubmit", "compare", "sync"):
        for word in odd:
            yield (command, word)
            yield ("--ledger", word, command)
            yield (command, "--state", word)
    for word in odd:
        yield ("logs", "--rank", word)
        yield ("logs", "-n", word)
        yield ("compare", "--at", word)
        yield ("compare", "--metric", word)
        yield (word,)


def _number_keys() -> set[str]:
    from tests.config.test_bounds import _numbers
    from trainer.config.keys.fields import fields

    return {
        key for key in setting_keys() if _numbers(fields()[key].annotation, fields()[key].metadata)
    }


def command_lines(count: int, seed: int) -> list[Case]:
    """``count`` of all command lines."""
    return random.Random(seed).sample(list(all_command_lines()), count)
