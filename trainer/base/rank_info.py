"""Which rank this process is, from Slurm's variables or from RANK and WORLD_SIZE."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from trainer.base.errors import UserError

SLURM_SWITCH = "PLIMSOLL_SLURM"
"""The batch script sets this to 1. SLURM_* alone may come from an interactive allocation and
mean nothing.
"""
ROLLOUT_NODES = "PLIMSOLL_ROLLOUT_NODES"
"""Number of nodes of a job, its last ones, that hold vLLM servers and no rank; the batch script
sets it.
"""
LAUNCH = "PLIMSOLL_LAUNCH"
"""The launch that a batch script belongs to: only the owner of a run folder may begin an attempt
(``trainer.base.run_owner``).
"""
ATTEMPT = "PLIMSOLL_ATTEMPT"
"""Number of the attempt, set by the launcher or the batch script."""
_LAUNCHER_FIX = "set RANK, WORLD_SIZE and LOCAL_RANK together, or unset them all"
_SRUN_FIX = (
    f"{SLURM_SWITCH}=1 wants a process started by srun; unset {SLURM_SWITCH} to run without Slurm"
)

MAX_NODES = 100_000
"""Most nodes that a span of a node list stands for; a longer one is no node list."""


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """One rank among all; ``master_port`` is None when rank 0 has to choose and publish it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    master_addr: str
    master_port: int | None


@dataclass(frozen=True, kw_only=True)
class RolloutTask:
    """A process that is no rank: it runs on a node that only holds vLLM servers."""

    node: int
    """Number of the node among the rollout nodes, from 0."""
    local_id: int
    tasks: int
    """Processes of the job on this node."""
    master_addr: str


def rank_from_environment(env: Mapping[str, str] | None = None) -> RankInfo:
    """This process's rank from SLURM_* when the batch script asks for it, else from
    RANK/WORLD_SIZE/..., else one rank.

    Under srun, RANK and its like are leftovers of another launcher.

    Raises :class:`UserError` when a variable is missing, not a number, or out of range.
    """
    env = os.environ if env is None else env
    if env.get(SLURM_SWITCH) == "1":
        info = _from_slurm(env)
    elif "RANK" in env or "WORLD_SIZE" in env:
        info = _from_launcher(env)
    else:
        return RankInfo(
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            master_addr="127.0.0.1",
            master_port=None,
        )
    rank_fits = 0 <= info.rank < info.world_size
    local_rank_fits = 0 <= info.local_rank < info.local_world_size
    if not rank_fits or not local_rank_fits:
        raise UserError(
            f"The environment names rank {info.rank} of {info.world_size} (local rank "
            f"{info.local_rank} of {info.local_world_size}): ranks count from 0. Unset RANK, "
            "WORLD_SIZE and LOCAL_RANK, or set them right."
        )
    return info


def rollout_task(env: Mapping[str, str] | None = None) -> RolloutTask | None:
    """This process on a node that only holds servers; None for a rank.

    Raises :class:`UserError` as :func:`rank_from_environment` does.
    """
    env = os.environ if env is None else env
    count = num_rollout_nodes(env)
    if count == 0:
        return None
    node, per_node = _slurm_nodes(env)
    first = len(per_node) - count
    if first < 1:
        raise UserError(
            f"{ROLLOUT_NODES}={count} leaves none of the job's {len(per_node)} node(s) to train on."
        )
    if node < first:
        return None
    return RolloutTask(
        node=node - first,
        local_id=_number(env, "SLURM_LOCALID", _SRUN_FIX),
        tasks=per_node[node],
        master_addr=_slurm_master(env),
    )


def num_rollout_nodes(env: Mapping[str, str] | None = None) -> int:
    """The number of nodes of this job that hold servers only; 0 without Slurm.

    Raises :class:`UserError` when the variable is not a number.
    """
    env = os.environ if env is None else env
    if env.get(SLURM_SWITCH) != "1" or ROLLOUT_NODES not in env:
        return 0
    return _number(env, ROLLOUT_NODES, _SRUN_FIX)


def attempt_name(env: Mapping[str, str] | None = None) -> str | None:
    """A name that no other attempt of the run has; None when this attempt has no number."""
    env = os.environ if env is None else env
    if ATTEMPT not in env and "SLURM_JOB_ID" not in env:
        return None
    job_variables = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    job = [env[name] for name in job_variables if name in env]
    return "-".join([f"attempt_{env.get(ATTEMPT, 0)}", *job])


def first_host(nodelist: str) -> str:
    """The first host of a Slurm node list: ``gpu[003-006,9],cpu1`` -> ``gpu003``."""
    host, rest = _until_bracket(nodelist)
    while rest.startswith("["):
        numbers, _, rest = rest[1:].partition("]")
        text, rest = _until_bracket(rest)
        host += re.split(r"[,-]", numbers)[0] + text
    return host


def hosts_of(nodelist: str) -> list[str]:
    """The hosts of a Slurm node list, in its order: ``gpu[08-10],cpu1`` -> gpu08, gpu09, gpu10,
    cpu1.
    """
    hosts: list[str] = []
    for part in re.findall(r"(?:[^,\[]|\[[^\]]*\])+", nodelist):
        names = [""]
        for text, numbers in re.findall(r"([^\[]*)(?:\[([^\]]*)\])?", part):
            names = [name + text + number for name in names for number in _numbers(numbers)]
        hosts += names
    return hosts


def _numbers(text: str) -> list[str]:
    """The numbers in a bracket of a node list, with their leading zeros: ``08-10,12``."""
    numbers: list[str] = []
    for span in text.split(","):
        low, _, high = span.partition("-")
        if not (low.isdigit() and high.isdigit() and int(high) - int(low) < MAX_NODES):
            numbers.append(low)
            continue
        numbers += [str(number).zfill(len(low)) for number in range(int(low), int(high) + 1)]
    return numbers


def tasks_per_node(text: str) -> list[int]:
    """The tasks of each node [nodes]: Slurm's ``2(x3),1`` -> [2, 2, 2, 1]."""
    counts: list[int] = []
    for number, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", text):
        counts += [int(number)] * int(times or 1)
    return counts or [1]


def _from_launcher(env: Mapping[str, str]) -> RankInfo:
    world_size = _number(env, "WORLD_SIZE", _LAUNCHER_FIX)
    rank = _number(env, "RANK", _LAUNCHER_FIX)
    local_rank = 0
    if world_size > 1 or "LOCAL_RANK" in env:
        local_rank = _number(env, "LOCAL_RANK", _LAUNCHER_FIX)
    local_world_size = world_size
    if "LOCAL_WORLD_SIZE" in env:
        local_world_size = _number(env, "LOCAL_WORLD_SIZE", _LAUNCHER_FIX)
    return RankInfo(
        rank=rank,
        world_size=world_size,
        local_rank=local_rank,
        local_world_size=local_world_size,
        master_addr=env.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_master_port(env, _LAUNCHER_FIX),
    )


def _from_slurm(env: Mapping[str, str]) -> RankInfo:
    node, per_node = _slurm_nodes(env)
    without_ranks = per_node[len(per_node) - num_rollout_nodes(env) :]
    return RankInfo(
        rank=_number(env, "SLURM_PROCID", _SRUN_FIX),
        world_size=_number(env, "SLURM_NTASKS", _SRUN_FIX) - sum(without_ranks),
        local_rank=_number(env, "SLURM_LOCALID", _SRUN_FIX),
        local_world_size=per_node[node] if node < len(per_node) else per_node[-1],
        master_addr=_slurm_master(env),
        master_port=_master_port(env, _SRUN_FIX),
    )


def _slurm_nodes(env: Mapping[str, str]) -> tuple[int, list[int]]:
    """This node's number, and the tasks of every node."""
    node = _number(env, "SLURM_NODEID", _SRUN_FIX) if "SLURM_NODEID" in env else 0
    tasks = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE")
    return node, tasks_per_node(tasks or str(_number(env, "SLURM_NTASKS", _SRUN_FIX)))


def _slurm_master(env: Mapping[str, str]) -> str:
    hosts = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST") or "127.0.0.1"
    return env.get("MASTER_ADDR") or first_host(hosts)


def _master_port(env: Mapping[str, str], fix: str) -> int | None:
    return _number(env, "MASTER_PORT", fix) if "MASTER_PORT" in env else None


def _number(env: Mapping[str, str], key: str, fix: str) -> int:
    if key not in env:
        raise UserError(f"The environment variable {key} is not set: {fix}.")
    try:
        return int(env[key])
    except ValueError:
        raise UserError(
            f"The environment variable {key}={env[key]!r} is not a whole number: {fix}."
        ) from None


def _until_bracket(text: str) -> tuple[str, str]:
    """``text`` up to the first comma or bracket, and the rest."""
    head = re.split(r"[,\[]", text, maxsplit=1)[0]
    return head, text[len(head) :]
