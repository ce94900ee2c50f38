"""Arrays: nothing lost, nothing twice, one shape each, never above MaxArraySize."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jobs import ledger
from jobs.evidence import states_of
from jobs.ledger import Entry
from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.plan import Job, PreviousRun, make_plan
from jobs.submit.shape import Shape, shape_of
from jobs.submit.signature import signature_of
from trainer.base.errors import UserError


def job(index: int, ranks: int = 1, signature: str | None = None) -> Job:
    shape = Shape(
        nodes=1, ranks_per_node=ranks, gpus_per_node=ranks, cluster=Cluster(), container=Container()
    )
    return Job(
        index=index,
        overrides=(f"x={index}",),
        config={},
        run=Path(f"/r/{index}"),
        shape=shape,
        signature=signature or f"s{index}",
    )


@given(st.lists(st.integers(1, 4), max_size=60), st.integers(1, 20))
def test_every_job_is_in_exactly_one_array_of_its_shape(ranks: list[int], limit: int) -> None:
    plan = make_plan(
        [job(n, r) for n, r in enumerate(ranks)], max_array_size=limit, resubmit="failed"
    )
    assert sorted(j.index for j in plan.jobs) == list(range(len(ranks)))
    for batch in plan.batches:
        assert 1 <= len(batch.jobs) <= limit
        assert {j.shape for j in batch.jobs} == {batch.shape}
    assert len({b.name for b in plan.batches}) == len(plan.batches)
    assert len(plan.batches) == sum(-(-ranks.count(r) // limit) for r in set(ranks))


@pytest.mark.parametrize(
    ("resubmit", "state", "submitted", "again"),
    [
        ("failed", "FAILED", 1, True),
        ("failed", "EXHAUSTED", 1, True),
        ("failed", "COMPLETED", 0, False),
        ("failed", "RUNNING", 0, False),
        ("never", "FAILED", 0, False),
        ("always", "COMPLETED", 1, False),
    ],
)
def test_a_repeated_config(resubmit: str, state: str, submitted: int, again: bool) -> None:
    earlier = {"s0": [PreviousRun(run=Path("/old"), state=state, name="sweep/3")]}
    plan = make_plan([job(0)], max_array_size=10, resubmit=resubmit, previous=earlier)
    assert len(plan.jobs) == submitted
    if submitted:
        assert plan.jobs[0].run == (Path("/old") if again else Path("/r/0"))
        assert plan.jobs[0].resumes is again
    else:
        assert "sweep/3" in plan.skipped[0][1]


def test_the_same_config_twice_in_a_sweep_runs_once() -> None:
    plan = make_plan(
        [job(0, signature="a"), job(1, signature="a")], max_array_size=10, resubmit="always"
    )
    assert [j.index for j in plan.jobs] == [0]
    assert "job 0" in plan.skipped[0][1]


def test_gpu_hours() -> None:
    assert make_plan([job(0, 2), job(1, 4)], max_array_size=9, resubmit="never").gpu_hours(
        90
    ) == pytest.approx(9.0)


def test_signature_ignores_where_but_not_what() -> None:
    config = {
        "trainer": {"default_local_dir": "a", "seed": 1},
        "data": {"x": [1, 2]},
        "cluster": {"name": "a"},
    }
    moved = {
        "data": {"x": [1, 2]},
        "cluster": None,
        "trainer": {"seed": 1, "default_local_dir": "b"},
    }
    other = {**config, "data": {"x": [2, 1]}}
    assert signature_of(config) == signature_of(moved) != signature_of(other)


def test_shape_from_the_jobs_own_config() -> None:
    shape = shape_of({"trainer": {"nnodes": 2, "n_gpus_per_node": 4, "device": "auto"}})
    assert (shape.ranks, shape.gpus, shape.label()) == (8, 8, "2n4g")
    cpu = shape_of({"trainer": {"n_gpus_per_node": 4, "device": "cpu"}})
    assert (cpu.ranks, cpu.gpus, cpu.label()) == (4, 0, "1n4c")
    servers = {"rollout": {"nnodes": 3, "server": {"replicas": 2}, "tensor_model_parallel_size": 2}}
    more = shape_of({"trainer": {"nnodes": 2, "n_gpus_per_node": 4}, "actor_rollout_ref": servers})
    assert (more.nodes, more.rollout_nodes, more.ranks, more.gpus, more.label()) == (
        5,
        3,
        8,
        20,
        "5n4g3r",
    )


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"trainer": {"nnodes": 0}}, "trainer.nnodes=0"),
        (
            {"trainer": {"n_gpus_per_node": 9}, "cluster": {"max_gpus_per_node": 8}},
            "more trainer.nnodes",
        ),
        (
            {
                "trainer": {"n_gpus_per_node": 2},
                "actor_rollout_ref": {"rollout": {"nnodes": 1, "server": {"replicas": 3}}},
            },
            "is 3 GPUs of each node that holds servers, which has trainer.n_gpus_per_node=2",
        ),
        ({"cluster": {"partiton": "x"}}, "did you mean 'partition'"),
        ({"cluster": {"gpu_style": "gpu"}}, "gpus-per-node"),
        ({"cluster": {"partition": "a; rm -rf /"}}, "not a Slurm name"),
        ({"cluster": {"sbatch_args": ["x\n#SBATCH --uid=0"]}}, "not one argument"),
        ({"container": {"runtime": "docker"}}, "apptainer"),
        ({"container": {"runtime": "apptainer"}}, "container.image="),
    ],
)
def test_bad_sizes_and_sites_name_the_key_and_the_way_out(config: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        shape_of(config)
    assert words in str(caught.value)


def test_a_thousand_jobs_plan_and_list_with_little_work(tmp_path: Path) -> None:
    """By the clock of this thread: what other programs do doesn't count."""
    began = time.thread_time()
    configs = [
        {
            "trainer": {"nnodes": 1 + n % 2, "n_gpus_per_node": 1 + n % 4},
            "seed": n,
            "long": list(range(100)),
        }
        for n in range(1000)
    ]
    jobs = [
        Job(
            index=n,
            overrides=(f"seed={n}",),
            config=c,
            run=tmp_path / str(n),
            shape=shape_of(c),
            signature=signature_of(c),
        )
        for n, c in enumerate(configs)
    ]
    plan = make_plan(jobs, max_array_size=100, resubmit="failed")
    entries = [
        Entry(
            name=f"big/{j.index}",
            sweep="big",
            run=str(j.run),
            signature=j.signature,
            overrides=j.overrides,
            shape=j.shape.label(),
            gpus=j.shape.gpus,
            launch="l",
            phase=ledger.SUBMITTED,
            job=f"9_{j.index}",
        )
        for j in plan.jobs
    ]
    ledger.append(tmp_path / "ledger.jsonl", entries)
    planned = time.thread_time() - began
    assert len(plan.batches) == 12 and len(plan.jobs) == 1000  # 4 shapes of 250, in chunks of 100
    began = time.thread_time()
    states = states_of(ledger.read(tmp_path / "ledger.jsonl"), None)
    listed = time.thread_time() - began
    assert len(states) == 1000
    assert planned < 10.0 and listed < 5.0
