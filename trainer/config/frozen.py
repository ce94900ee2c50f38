"""The run folder's ``config.yaml``: what was checked is what runs, now and in every later
attempt.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.base import atomic
from trainer.base.errors import UserError, first_line
from trainer.base.foreign import require_no_other_run
from trainer.base.metrics_file import METRICS_FILE
from trainer.base.yaml_files import require_readable
from trainer.config.checks.problems import raise_problems
from trainer.config.keys import dotted
from trainer.config.keys.derived import with_expressions
from trainer.config.keys.fields import marked, may_change_keys
from trainer.config.keys.tree import format_value, leaves
from trainer.config.loading import load
from trainer.config.schema import Config
from trainer.config.schema.markers import LocalPath, UserFile
from trainer.config.user_files import freeze_files, read_contents, user_path

FILE = "config.yaml"
_Dumper = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
"""A sweep writes a thousand files; the one in C takes a tenth of the time."""
HEADER = (
    "# The settings of this run. The same command continues it; elsewhere the same run starts anew "
    "with\n"
    "#   python -m trainer --config-path THIS_FOLDER --config-name config "
    "trainer.default_local_dir=OTHER_FOLDER\n"
    "# A key written ${...} follows another one until it is set itself.\n"
)


def run_dir_of(config: Config) -> Path:
    """Absolute path of the run folder."""
    return Path(os.path.abspath(os.path.expanduser(config.trainer.default_local_dir)))


def freeze(config: Config, run_dir: Path) -> Path:
    """Write ``<run_dir>/config.yaml`` (0600, in a 0700 folder, atomically) and return its path,
    and keep copies of the user's files that it names.

    When the run has started before, other values are taken only for keys that the schema marks as
    ``MAY_CHANGE``, and other files only with ``trainer.accept_changed_files``. Raises UserError
    that names every other differing key with both values, a file that differs, the folder that
    can't be written, or the checkpoints of another program in it.
    """
    values = _with_absolute_paths(config.model_dump())
    values["trainer"]["default_local_dir"] = str(run_dir)
    path = run_dir / FILE
    try:
        if not path.exists():
            require_no_other_run(run_dir)
        run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        started = path.exists() and has_started(run_dir)
        if started:
            raise_problems(_differences(load_frozen(run_dir).model_dump(), values, run_dir))
        accept = config.trainer.accept_changed_files
        freeze_files(read_contents(config), run_dir, started=started, accept=accept)
        text = yaml.dump(
            with_expressions(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True
        )
        atomic.write_text(path, HEADER + text)
    except OSError as error:
        raise UserError(
            f"the run folder {run_dir} can't be written ({error.strerror or error}); set "
            "trainer.default_local_dir to a folder of yours with free space"
        ) from error
    return path


def load_frozen(run_dir: Path, *, complete: bool = True) -> Config:
    """The checked settings of a run folder. Keys that are newer than the file get their defaults.
    ``complete=False``, to look at a run, lets data and model be missing.

    Raises UserError when the file can't be read or holds wrong settings.
    """
    path = run_dir / FILE
    require_readable(path)
    try:
        raw = OmegaConf.load(path)  # reads 1e-6 as a number, which PyYAML does not
    except (OSError, ValueError, yaml.YAMLError, OmegaConfBaseException) as error:
        raise UserError(f"{path} holds no settings ({first_line(error)})") from error
    if not isinstance(raw, DictConfig):
        raise UserError(f"{path} holds no settings; give the folder of a run")
    try:
        return load(raw, complete=complete)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def has_started(run_dir: Path) -> bool:
    """Whether anything was trained in ``run_dir``: then its settings bind."""
    metrics = run_dir / METRICS_FILE
    if metrics.is_file() and metrics.stat().st_size > 0:
        return True
    return any(True for folder in (run_dir, run_dir / "checkpoints") for _ in folder.glob("step_*"))


def _differences(old: dict[str, Any], new: dict[str, Any], run_dir: Path) -> list[str]:
    """A message for each key that differs although a resumed run may not change it."""
    before = dict(leaves(old))
    problems = []
    for key, value in leaves(new):
        if before.get(key) == value or _may_change(key):
            continue
        old_value = format_value(before.get(key))
        problems.append(
            f"{key}={format_value(value)}, but the run in {run_dir} was started with "
            f"{old_value}: type {key}={old_value} to continue it, or set another "
            "trainer.experiment_name"
        )
    return problems


def _may_change(key: str) -> bool:
    return any(key == name or key.startswith(f"{name}.") for name in may_change_keys())


def _with_absolute_paths(values: dict[str, Any]) -> dict[str, Any]:
    """Paths that exist here, made absolute, so that the run repeats from any folder."""
    for key, _ in marked(LocalPath):
        value = dotted.get(values, key)
        if isinstance(value, list):
            value = [_absolute(item) for item in value]
        else:
            value = _absolute(value)
        dotted.put(values, key, value)
    for key, marker in marked(UserFile):
        file = user_path(dotted.get(values, key), marker)
        if file is not None:
            dotted.put(values, key, str(file))
    return values


def _absolute(text: str | None) -> str | None:
    if text is None or "://" in text:
        return text
    folder = os.path.expanduser(text.split("*", 1)[0])
    if not os.path.exists(os.path.dirname(folder) or folder):
        return text
    return os.path.abspath(os.path.expanduser(text))
