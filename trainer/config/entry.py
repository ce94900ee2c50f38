"""From a command line to composed settings, through Hydra."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

import hydra
from omegaconf import DictConfig, OmegaConf

from trainer.base.command import let_hydra_raise, restore_full_error
from trainer.base.errors import UserError, as_user_error
from trainer.base.masking import holds_secret, secret_refused
from trainer.config.checks.problems import SettingsError, raise_problems
from trainer.config.cli import message_of, print_error
from trainer.config.keys.conf_tree import conf_dir
from trainer.config.keys.tree import NOT_SETTINGS
from trainer.config.overrides import CommandLine, check_overrides
from trainer.config.verl.translate import accepted_line, translate_tree


def compose_and_call(
    task: Callable[[DictConfig], int], argv: Sequence[str], *, starts_run: bool = True
) -> int:
    """Compose the settings of ``argv`` and call ``task`` with them, or hand them to the launcher of
    a sweep. Returns the exit code.

    ``starts_run``: whether ``task`` starts a run on this machine, or only shows something. Wrong
    input, the user's or as Hydra sees it, becomes one message and exit code 2.
    """
    try:
        _require_no_secret_for_scripts(argv)
        line = check_overrides(argv, starts_run=starts_run)
        if line.multirun:
            raise_problems(line.problems)
        for note in line.notes:
            sys.stderr.write(f"[HINT] {note}\n")
        sys.argv = [sys.argv[0], *line.argv]
        return _Call(task, line, argv, complete=starts_run).compose()
    except (UserError, OSError) as error:
        user_error = as_user_error(error)
        if user_error is None:
            raise
        return print_error(user_error.with_traceback(error.__traceback__))


def _require_no_secret_for_scripts(argv: Sequence[str]) -> None:
    """Raise UserError for a secret in what goes into scripts, before Hydra writes it down too."""
    for word in argv:
        key, _, value = word.lstrip("+").partition("=")
        if key.startswith(("hydra.", "cluster.", "container.")) and holds_secret(value):
            raise UserError(secret_refused(key, value))


class _Call:
    """One composition, and the task that it ends in. What fails before the task is the settings'
    fault; what the task raises is its own.
    """

    def __init__(
        self,
        task: Callable[[DictConfig], int],
        line: CommandLine,
        typed: Sequence[str],
        *,
        complete: bool,
    ) -> None:
        self.task = task
        self.line = line
        self.typed = typed
        self.complete = complete
        self.code = 0
        self.error: Exception | None = None

    def compose(self) -> int:
        """Compose ``sys.argv`` and call the task; its exit code. Raises UserError, and what the
        task raises.
        """
        let_hydra_raise()
        decorate = hydra.main(config_path=str(conf_dir()), config_name="config", version_base="1.3")
        try:
            decorate(self._run)()
        except Exception as error:
            message = _with_typed_keys(message_of(error), self.typed)
            raise SettingsError([*self.line.problems, message]) from error
        finally:
            restore_full_error()
        if self.error is not None:
            raise self.error
        return self.code

    def _run(self, settings: DictConfig) -> None:
        restore_full_error()
        try:
            problems = self.line.problems
            if problems:
                raise_problems([*problems, *_problems_of(settings, complete=self.complete)])
            note = _note_on_files(settings)
            if note is not None:
                sys.stderr.write(f"[HINT] {note}\n")
            self.code = max(self.code, self.task(settings))
        except Exception as error:
            self.error = error


def _with_typed_keys(message: str, argv: Sequence[str]) -> str:
    """``message``, with the typed keys of Hydra's own sections that refer to something, unless it
    names one: OmegaConf doesn't say which of them can't be resolved.
    """
    keys = []
    for word in argv:
        key, _, value = word.lstrip("+").partition("=")
        if key.startswith("hydra.") and "${" in value:
            keys.append(key)
    if not keys or any(key in message for key in keys):
        return message
    return (
        f"{message.rstrip('.')}, in {' or '.join(keys)}: refer to a setting that has a value of "
        "its type"
    )


def _problems_of(settings: DictConfig, *, complete: bool) -> list[str]:
    """What is wrong with composed settings."""
    from trainer.config.loading import load  # the schema: --cfg job answers without it

    try:
        load(settings, complete=complete)
    except SettingsError as error:
        return error.problems
    return []


def _note_on_files(settings: DictConfig) -> str | None:
    """One line on verl's settings in a file of the user's that change nothing here; those of the
    command line are left out of ``settings`` already.
    """
    tree = OmegaConf.to_container(settings, resolve=False)
    assert isinstance(tree, dict)
    own = {str(key): value for key, value in tree.items() if key not in NOT_SETTINGS}
    translations, _ = translate_tree(own)
    return accepted_line(translations)
