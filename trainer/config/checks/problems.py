"""Many messages become one error. Does not import the schema."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.base.errors import UserError, first_line


class SettingsError(UserError):
    """Wrong settings: ``problems`` has one message for each."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = list(problems)
        text = "".join(self.problems[:1])
        if len(self.problems) > 1:
            lines = "\n".join(f"  - {problem}" for problem in self.problems)
            text = f"{len(self.problems)} problems in the settings:\n{lines}"
        super().__init__(text)


def raise_problems(problems: Sequence[str]) -> None:
    """Raise one SettingsError that lists every problem, unless there is none."""
    if problems:
        raise SettingsError(problems)


def with_key(error: BaseException) -> str:
    """The first line of what OmegaConf says, and the key that it is about."""
    text = first_line(error)
    cause: BaseException | None = error
    while cause is not None:
        key = getattr(cause, "full_key", None)
        if key:
            return text if str(key) in text else f"{text} ({key})"
        cause = cause.__cause__ or cause.__context__
    return text
