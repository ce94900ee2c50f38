"""Hostile command lines: one message, an exit code that docs name, an end, and nothing wrong
accepted.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzz import child
from tests.fuzz.cases import Case, command_lines


@pytest.mark.parametrize(
    ("count", "seed"),
    [(12, 1), pytest.param(500, 2, marks=pytest.mark.exhaustive)],
    ids=["short", "long"],
)
def test_command_lines(fake: Path, tmp_path: Path, count: int, seed: int) -> None:
    child.preload()
    cwd = tmp_path / "cwd"
    cwd.mkdir()
    wrong = []
    for case in command_lines(count, seed):
        ended = child.run(case.command, case.argv, cwd, {"HOME": str(tmp_path)}, tmp_path)
        problem = problem_of(case, ended)
        if problem:
            wrong.append(f"{problem}: {case.command} {case.argv!r}\n{ended.err[-1500:]}")
    assert not wrong, f"{len(wrong)} of {count}\n" + "\n\n".join(wrong)


def problem_of(case: Case, ended: child.Ended) -> str | None:
    """What is wrong with the end of a command; None when all is well."""
    both = ended.out + ended.err
    if ended.code < 0:
        return f"killed by signal {-ended.code}"
    if ended.code not in (0, 2):
        return f"exit code {ended.code}"
    if "Traceback" in both or "This is a bug" in both:
        return "a traceback"
    if ended.code == 0 and case.refused:
        return "accepted"
    if ended.code == 2:
        name = case.names.rpartition(".")[2]
        if not ended.err.strip():
            return "no message"
        if name not in ended.err:
            return f"the message doesn't name {name}"
        if len(ended.err) > 9000:
            return f"a message of {len(ended.err)} characters"
        if not ended.err.replace("\n", "").isprintable():
            return "control characters in the message"
    return None
