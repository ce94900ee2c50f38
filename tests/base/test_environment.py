"""A process's threads, its programs, and what its start does not import."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from trainer.base.environment import _cgroup_quota, available_cores, process_settings


def test_threads_are_the_cores_over_the_ranks_and_the_users_own_setting_wins() -> None:
    cores = available_cores()
    assert process_settings({}, 1)["OMP_NUM_THREADS"] == str(cores)
    assert process_settings({}, 2 * cores)["OMP_NUM_THREADS"] == "1"
    assert process_settings({}, 1)["OMP_WAIT_POLICY"] == "PASSIVE"
    own = process_settings({"OMP_NUM_THREADS": "7", "OMP_WAIT_POLICY": "ACTIVE"}, 1)
    assert not {"OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT"} & set(own)
    assert process_settings({"OMP_WAIT_POLICY": "passive"}, 1)["GOMP_SPINCOUNT"] == "20000"


def test_the_affinity_mask_counts() -> None:
    one = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, [{one}]); "
        "from trainer.base.environment import available_cores; print(available_cores())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "1"


def test_the_cgroups_quota_counts(tmp_path: Path) -> None:
    assert _cgroup_quota(tmp_path) is None
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("-1\n")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000\n")
    assert _cgroup_quota(tmp_path) is None
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("150000\n")
    assert _cgroup_quota(tmp_path) == 1.5
    (tmp_path / "cpu.max").write_text("400000 100000\n")
    assert _cgroup_quota(tmp_path) == 4.0
    (tmp_path / "cpu.max").write_text("max 100000\n")
    assert _cgroup_quota(tmp_path) is None


def test_this_environments_programs_come_first_once() -> None:
    own = os.path.dirname(sys.executable)
    assert process_settings({"PATH": f"/bin:{own}:/usr/bin"}, 1)["PATH"] == f"{own}:/bin:/usr/bin"


def test_nothing_heavy_is_imported() -> None:
    modules = (
        "trainer.base.environment, trainer.base.signals, trainer.base.memory, "
        "trainer.base.model_shape, trainer.launch, trainer.launch.rollout_nodes"
    )
    code = f"import sys, {modules}; print('torch' in sys.modules)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=True
    )
    assert done.stdout.strip() == "False"
