"""The fake Slurm of the jobs' tests."""

from tests.jobs.conftest import fake

__all__ = ["fake"]
