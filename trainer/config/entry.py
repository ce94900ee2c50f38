"""From a command line to composed settings, through Hydra."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence

import hydra
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from trainer.base.errors import UserError, as_user_error
from trainer.config.checks.problems import SettingsError, raise_problems
from trainer.config.cli import message_of, print_error
from trainer.config.keys.conf_tree import conf_dir
from trainer.config.overrides import check_overrides

_FULL_ERROR = "HYDRA_FULL_ERROR"


def compose_and_call(
    task: Callable[[DictConfig], int], argv: Sequence[str], *, starts_run: bool = True
) -> int:
    """Compose the settings of ``argv`` and call ``task`` with them, or hand them to the launcher of
    a sweep. Returns the exit code.

    ``starts_run``: whether ``task`` starts a run on this machine, or only shows something. Wrong
    input, the user's or as Hydra sees it, becomes one message and exit code 2.
    """
    full_error = os.environ.get(_FULL_ERROR)
    code = 0

    def restore_environment() -> None:
        os.environ.pop(_FULL_ERROR, None)
        if full_error is not None:
            os.environ[_FULL_ERROR] = full_error

    def compose() -> int:
        line = check_overrides(argv, starts_run=starts_run)
        if line.multirun:
            raise_problems(line.problems)
        for note in line.notes:
            sys.stderr.write(f"[HINT] {note}\n")

        def checked_task(settings: DictConfig) -> int:
            if line.problems:
                raise_problems([*line.problems, *_problems_of(settings, complete=starts_run)])
            return task(settings)

        def call_task(settings: DictConfig) -> None:
            nonlocal code
            restore_environment()
            code = max(code, _exit_code_of(lambda: checked_task(settings)))

        sys.argv = [sys.argv[0], *line.argv]
        os.environ[_FULL_ERROR] = "1"  # Hydra shall raise its errors instead of printing them
        decorate = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
        try:
            decorate(call_task)()
        except (HydraException, OmegaConfBaseException) as error:
            raise_problems([*line.problems, message_of(error)] if line.problems else [])
            raise
        finally:
            restore_environment()
        return code

    return _exit_code_of(compose)


def _problems_of(settings: DictConfig, *, complete: bool) -> list[str]:
    """What is wrong with composed settings."""
    from trainer.config.loading import load  # the schema: --cfg job answers without it

    try:
        load(settings, complete=complete)
    except SettingsError as error:
        return error.problems
    return []


def _exit_code_of(step: Callable[[], int]) -> int:
    """What ``step`` returns; an error that the user can mend is printed instead of raised."""
    try:
        return step()
    except (HydraException, OmegaConfBaseException) as error:
        return print_error(error)
    except (UserError, OSError) as error:
        user_error = as_user_error(error)
        if user_error is None:
            raise
        return print_error(user_error.with_traceback(error.__traceback__))
