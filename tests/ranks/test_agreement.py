"""What one rank meets is raised on all of them, so that none waits for another for ever."""

from __future__ import annotations

from typing import Any

import pytest

from tests.ranks.worlds import run_as_threads
from trainer.base import signals
from trainer.base.errors import Failure, UserError
from trainer.base.signals import CAUSES, StopRequested
from trainer.ranks.agreement import AgreedError, agreed, raise_on_all


class EngineLost(Failure):
    pass


def raised_with(
    errors: list[Failure | UserError | StopRequested | None],
) -> list[BaseException | None]:
    def work(world: Any) -> None:
        raise_on_all(world, errors[world.rank], elsewhere=EngineLost("elsewhere"))

    return run_as_threads(len(errors), work)


def test_nothing_is_raised_without_an_error() -> None:
    assert raised_with([None, None]) == [None, None]


def test_wrong_input_of_one_rank_has_its_text_on_all() -> None:
    raised = raised_with([None, UserError("row 7 is empty"), UserError("row 9 is empty")])
    assert [type(error) for error in raised] == [AgreedError] * 3
    assert {str(error) for error in raised} == {"row 7 is empty"}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_stop_of_one_rank_is_raised_on_all(cause: str) -> None:
    raised = raised_with([None, StopRequested(cause), None])
    assert [(type(e), getattr(e, "cause", "")) for e in raised] == [(StopRequested, cause)] * 3


def test_a_stop_hides_a_lost_engine_but_not_wrong_input() -> None:
    """The signal may have ended the engine; wrong input would be met again."""
    stop = StopRequested("TERM")
    assert [type(e) for e in raised_with([EngineLost("gone"), stop])] == [StopRequested] * 2
    assert [type(e) for e in raised_with([UserError("row 7"), stop])] == [AgreedError] * 2


def test_an_engine_lost_after_a_request_is_taken_for_the_stop(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signals._request, "cause", "TERM")
    assert [type(e) for e in raised_with([EngineLost("gone"), None])] == [StopRequested] * 2


def test_a_failure_is_raised_as_it_is_and_as_another_elsewhere() -> None:
    raised = raised_with([EngineLost("gone"), None])
    assert [str(error) for error in raised] == ["gone", "elsewhere"]
    assert [type(error) for error in raised] == [EngineLost] * 2


def test_wrong_input_comes_before_a_failure() -> None:
    raised = raised_with([EngineLost("gone"), UserError("row 7 is empty")])
    assert [str(error) for error in raised] == ["row 7 is empty"] * 2


def test_the_body_of_one_rank_raises_on_all() -> None:
    def work(world: Any) -> None:
        with agreed(world):
            if world.rank == 1:
                raise UserError("row 7 is empty")

    raised = run_as_threads(2, work)
    assert [str(error) for error in raised] == ["row 7 is empty"] * 2


@pytest.mark.parametrize("kind", [RuntimeError, KeyboardInterrupt])
def test_other_errors_pass_through(kind: type[BaseException]) -> None:
    class Alone:
        def any(self, flag: int) -> int:
            raise AssertionError("no exchange follows such an error")

    with pytest.raises(kind), agreed(Alone()):  # type: ignore[arg-type]
        raise kind
