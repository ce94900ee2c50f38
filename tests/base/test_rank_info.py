"""Which rank a process is, under a launcher, under srun and alone."""

from __future__ import annotations

import pytest

from trainer.base.errors import UserError
from trainer.base.rank_info import (
    RankInfo,
    RolloutTask,
    first_host,
    hosts_of,
    rank_from_environment,
    rollout_task,
    tasks_per_node,
)

ALONE = RankInfo(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    master_addr="127.0.0.1",
    master_port=None,
)
SRUN = {
    "PLIMSOLL_SLURM": "1",
    "SLURM_PROCID": "5",
    "SLURM_NTASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,2",
    "SLURM_STEP_NODELIST": "gpu[07-08]",
}


def test_alone_without_a_launcher() -> None:
    assert rank_from_environment({}) == ALONE


def test_an_interactive_allocation_is_no_launcher() -> None:
    assert rank_from_environment({k: v for k, v in SRUN.items() if k != "PLIMSOLL_SLURM"}) == ALONE


def test_a_launchers_rank() -> None:
    env = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_PORT": "2",
        "MASTER_ADDR": "h",
    }
    expected = RankInfo(
        rank=3, world_size=4, local_rank=1, local_world_size=2, master_addr="h", master_port=2
    )
    assert rank_from_environment(env) == expected
    assert rank_from_environment(env | SRUN | {"PLIMSOLL_SLURM": "0"}) == expected


@pytest.mark.parametrize("leaked", [{}, {"RANK": "5", "WORLD_SIZE": "16", "LOCAL_RANK": "5"}])
def test_srun_s_rank_with_unequal_nodes(leaked: dict[str, str]) -> None:
    """Variables of another launcher, left over in the shell that submitted, don't count."""
    assert rank_from_environment(SRUN | leaked) == RankInfo(
        rank=5,
        world_size=6,
        local_rank=1,
        local_world_size=2,
        master_addr="gpu07",
        master_port=None,
    )


def test_the_last_nodes_may_hold_servers_and_no_rank() -> None:
    env = SRUN | {
        "PLIMSOLL_ROLLOUT_NODES": "2",
        "SLURM_STEP_TASKS_PER_NODE": "2(x4)",
        "SLURM_NTASKS": "8",
    }
    places = [
        env
        | {
            "SLURM_PROCID": str(2 * node + local),
            "SLURM_NODEID": str(node),
            "SLURM_LOCALID": str(local),
        }
        for node in range(4)
        for local in range(2)
    ]
    assert [rollout_task(place) for place in places[:4]] == [None] * 4
    ranks = [rank_from_environment(place) for place in places[:4]]
    assert [(r.rank, r.world_size, r.local_rank, r.local_world_size) for r in ranks] == [
        (0, 4, 0, 2),
        (1, 4, 1, 2),
        (2, 4, 0, 2),
        (3, 4, 1, 2),
    ]
    assert [rollout_task(place) for place in places[4:]] == [
        RolloutTask(node=node, local_id=local, tasks=2, master_addr="gpu07")
        for node in range(2)
        for local in range(2)
    ]
    assert [rollout_task(place | {"PLIMSOLL_SLURM": "0"}) for place in places] == [
        None
    ] * 8  # as any other process
    assert rollout_task(SRUN) is None
    leaked = {"RANK": "0", "WORLD_SIZE": "1"}
    assert rollout_task(places[7] | leaked) == rollout_task(places[7])
    with pytest.raises(UserError, match=r"ROLLOUT_NODES=4 leaves none of the job's 4 node"):
        rollout_task(env | {"PLIMSOLL_ROLLOUT_NODES": "4"})


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE is not set"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "LOCAL_RANK is not set"),
        ({"RANK": "x", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "RANK='x' is not a whole number"),
        ({"RANK": "2", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}, "rank 2 of 2"),
        ({"PLIMSOLL_SLURM": "1"}, "wants a process started by srun"),
    ],
)
def test_half_an_environment_says_what_is_missing(env: dict[str, str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        rank_from_environment(env)


@pytest.mark.parametrize(
    ("nodelist", "first"),
    [
        ("gpu[003-006,9],cpu1", "gpu003"),
        ("a,b", "a"),
        ("node7", "node7"),
        ("rack[1-2]n[04,09]x,z", "rack1n04x"),
        ("gpu-[1-3]", "gpu-1"),
    ],
)
def test_the_first_host(nodelist: str, first: str) -> None:
    assert first_host(nodelist) == first


@pytest.mark.parametrize(
    ("nodelist", "hosts"),
    [
        ("n1", ["n1"]),
        ("", []),
        ("gpu[08-10,2],cpu1", ["gpu08", "gpu09", "gpu10", "gpu2", "cpu1"]),
        ("a,b-[1-2]-ib", ["a", "b-1-ib", "b-2-ib"]),
        ("r[1-2]n[1,3]", ["r1n1", "r1n3", "r2n1", "r2n3"]),
        ("n[1-99999999999]", ["n1"]),
    ],
)
def test_hosts(nodelist: str, hosts: list[str]) -> None:
    assert hosts_of(nodelist) == hosts


def test_tasks_per_node() -> None:
    assert tasks_per_node("2(x3),1") == [2, 2, 2, 1] and tasks_per_node("8") == [8]
