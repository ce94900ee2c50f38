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
from trainer.config import overrides
from trainer.config.cli import complain
from trainer.config.keys.conf_tree import conf_dir

_FULL_ERROR = "HYDRA_FULL_ERROR"


def compose_and(
    task: Callable[[DictConfig], int], argv: Sequence[str], *, runs: bool = True
) -> int:
    """Compose the settings of ``argv`` and hand them to ``task``, which ``runs`` them or only looks
    at them, or to the launcher of a sweep; the exit code.

    Wrong input, the user's or as Hydra sees it, becomes one message and exit code 2.
    """
    wish = os.environ.get(_FULL_ERROR)
    code = 0

    def restore() -> None:
        os.environ.pop(_FULL_ERROR, None)
        if wish is not None:
            os.environ[_FULL_ERROR] = wish

    def job(settings: DictConfig) -> None:
        nonlocal code
        restore()
        code = max(code, _guarded(lambda: task(settings)))

    def compose() -> int:
        sys.argv = [sys.argv[0], *overrides.check(argv, runs=runs).argv]
        os.environ[_FULL_ERROR] = "1"  # Hydra shall raise its errors instead of printing them
        try:
            hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")(job)()
        finally:
            restore()
        return code

    return _guarded(compose)


def _guarded(step: Callable[[], int]) -> int:
    try:
        return step()
    except (HydraException, OmegaConfBaseException) as error:
        return complain(error)
    except (UserError, OSError) as error:
        if (users := as_user_error(error)) is None:
            raise
        return complain(users.with_traceback(error.__traceback__))
