"""The environment that Slurm's commands get."""

from __future__ import annotations

import os


def clean_environment() -> list[str]:
    """``env -u NAME ...``: takes away what an interactive allocation leaves behind and would change
    a new job.

    SLURM_CONF stays: it says which cluster is meant.
    """
    leaked = [
        n for n in os.environ if n.startswith(("SLURM_", "SRUN_", "SLURMD_")) and n != "SLURM_CONF"
    ]
    return ["env", *(word for name in sorted(leaked) for word in ("-u", name))]
