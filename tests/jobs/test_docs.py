"""Every command and key that the pages about jobs name exists."""

from __future__ import annotations

import re
import shlex
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from jobs.__main__ import parser
from jobs.submit.cluster_config import Cluster, Container
from jobs.submit.options import SlurmOptions
from jobs.view.compare import DEFAULT_METRICS
from jobs.view.table import ETTR, REWARD, SPEED
from tests.tracking.documented import undocumented

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "docs" / name for name in ("jobs.md", "slurm.md", "containers.md")]
GROUPS = {"cluster": Cluster, "container": Container, "hydra.launcher": SlurmOptions}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_keys_exist(page: Path) -> None:
    text = page.read_text()
    for group, kind in GROUPS.items():
        known = {field.name for field in fields(kind)}
        for name in re.findall(rf"(?<![\w./]){re.escape(group)}\.(\w+)", text):
            assert name in known, f"{page.name}: {group}.{name}"


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)
def test_commands_parse(page: Path) -> None:
    for line in re.findall(r"^python -m jobs (.*)$", page.read_text(), flags=re.MULTILINE):
        parser().parse_args(shlex.split(line, comments=True))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"^make ([\w-]+)", page.read_text(), flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_tables_show_metrics_that_runs_have() -> None:
    assert undocumented({*DEFAULT_METRICS, *REWARD, *SPEED, *ETTR}) == set()


@pytest.mark.parametrize(
    "path", sorted((ROOT / "conf").glob("c[lo][un]*/*.yaml")), ids=lambda path: path.name
)
def test_profiles_have_every_key(path: Path) -> None:
    kind = {"cluster": Cluster, "container": Container}[path.parent.name]
    assert set(yaml.safe_load(path.read_text())) == {field.name for field in fields(kind)}
