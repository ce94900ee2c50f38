"""What a site profile and an image may say: wrong values are one message, before a script is made
of them.
"""

from __future__ import annotations

from typing import Any

import pytest

from jobs.submit.cluster_config import Cluster, Container, from_mapping
from trainer.base.errors import UserError

WRONG: list[tuple[type[Any], dict[str, Any], str]] = [
    (
        Cluster,
        {"setup": "module load cuda"},
        "cluster.setup='module load cuda' must be a list of texts",
    ),
    (Cluster, {"sbatch_args": [3]}, "cluster.sbatch_args=[3] must be a list of texts"),
    (Cluster, {"cpus_per_task": 0}, "cluster.cpus_per_task=0 must be a whole number above 0"),
    (
        Cluster,
        {"max_gpus_per_node": 4.5},
        "cluster.max_gpus_per_node=4.5 must be a whole number above 0",
    ),
    (Cluster, {"mem_gb": -1}, "cluster.mem_gb=-1 must be a number above 0"),
    (Cluster, {"write_gb_s": float("nan")}, "cluster.write_gb_s=nan must be a number above 0"),
    (Cluster, {"grace_s": "2 min"}, "cluster.grace_s='2 min' must be a whole number of at least 0"),
    (Cluster, {"check_gpus": "no"}, "cluster.check_gpus='no' must be true or false"),
    (Cluster, {"write_gb_s": None}, "cluster.write_gb_s=None must be a number above 0"),
    (Cluster, {"name": ""}, "cluster.name='' must be a text"),
    (
        Container,
        {"image": "x.sif"},
        "container.image is not read with container.runtime=none: set the runtime to",
    ),
    (
        Container,
        {"runtime": "pyxis", "image": "x", "digest": "sha256:0"},
        "set the runtime to apptainer, or leave",
    ),
    (
        Container,
        {"runtime": "apptainer", "image": "x", "binds": "/data"},
        "container.binds='/data' must be a list",
    ),
]


@pytest.mark.parametrize(
    ("kind", "values", "message"), WRONG, ids=[message[:45] for _, _, message in WRONG]
)
def test_wrong_values(kind: type[Any], values: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError) as error:
        from_mapping(kind, values)
    assert message in str(error.value)


def test_right_values() -> None:
    site = from_mapping(
        Cluster,
        {"account": 1234, "mem_gb": 500, "grace_s": 0, "qos": None, "setup": ["module load x"]},
    )
    assert (site.account, site.mem_gb, site.grace_s, site.qos, site.setup) == (
        "1234",
        500,
        0,
        None,
        ("module load x",),
    )
