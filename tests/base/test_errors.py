"""Which errors a user can mend."""

from __future__ import annotations

import errno
import os

import pytest

from trainer.base.errors import UserError, as_user_error, nearest


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT, errno.EROFS])
def test_a_disk_that_takes_no_more_is_the_users_to_mend(number: int) -> None:
    error = as_user_error(OSError(number, os.strerror(number), "/run/metrics.jsonl"))
    assert error is not None
    assert "/run/metrics.jsonl" in str(error) and os.strerror(number) in str(error)
    assert "trainer.default_local_dir" in str(error)


def test_what_may_not_be_read_is_named() -> None:
    error = as_user_error(
        PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/data/secret/train.jsonl")
    )
    assert error is not None and str(error).startswith(
        "no access to /data/secret/train.jsonl (Permission denied): "
    )


def test_other_errors_keep_their_traceback() -> None:
    own = UserError("x")
    assert as_user_error(own) is own
    assert as_user_error(OSError(errno.EIO, "broken disk")) is None
    assert as_user_error(PermissionError(errno.EPERM, "a process of somebody else's")) is None
    assert as_user_error(ValueError("x")) is None


def test_the_nearest_word_is_offered() -> None:
    assert nearest("grppo", ["grpo", "ppo"]) == "; did you mean 'grpo'?"
    assert nearest("xyz", ["grpo"]) == ""
