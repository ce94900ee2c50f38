"""The W&B run of a training run.

It is a view: when W&B fails the training goes on, and the W&B run can be made again from
``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import secrets
import socket
import string
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from trainer.base import atomic
from trainer.base.json_files import Fields, is_text, optional, read_object

STEP_AXIS = "training/global_step"
IDENTITY_FILE = "wandb.json"
MODES = ("auto", "online", "offline", "disabled")
INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0
_SECRETS = (
    "api_key",
    "password",
    "secret",
    "secret_key",
    "access_key",
    "hf_token",
    "auth_token",
    "access_token",
)


@dataclass(frozen=True)
class WandbIdentity:
    """The id and names by which several attempts are one W&B run, from ``<run>/wandb.json``."""

    id: str
    project: str
    name: str
    group: str | None


_IDENTITY_FIELDS: Fields = {
    "id": lambda value: is_text(value) and bool(value),
    "project": is_text,
    "name": is_text,
    "group": optional(is_text),
}


def load_or_create_identity(
    run_dir: Path, project: str, name: str, group: str | None = None
) -> WandbIdentity:
    """The identity of the run's first attempt, or a new one, which is written before W&B starts.

    Without ``group``, WANDB_RUN_GROUP (a sweep sets it) is the group.
    """
    stored = load_identity(run_dir)
    if stored is not None:
        return stored
    group = group or os.environ.get("WANDB_RUN_GROUP")
    new = WandbIdentity(random_run_id(), project, name, group)
    save_identity(run_dir, new)
    return new


def save_identity(run_dir: Path, identity: WandbIdentity) -> None:
    """Write ``<run>/wandb.json``, whole and durable."""
    atomic.write_json(run_dir / IDENTITY_FILE, asdict(identity))


def load_identity(run_dir: Path) -> WandbIdentity | None:
    """The identity in ``<run>/wandb.json``; None when it isn't there or was cut short."""
    values = read_object(run_dir / IDENTITY_FILE, _IDENTITY_FIELDS)
    if not set(_IDENTITY_FIELDS) <= set(values):
        return None
    return WandbIdentity(**{name: values[name] for name in _IDENTITY_FIELDS})


def random_run_id() -> str:
    """Eight letters and digits, as W&B itself makes them; independent of the run's seeded
    generators.
    """
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def choose_mode(
    mode: str,
    env: Mapping[str, str],
    reachable: Callable[[str], bool],
    default_url: Callable[[], str],
) -> str:
    """``online``, ``offline`` or ``disabled``. ``auto``: WANDB_MODE, else online only with a key
    and a network.

    ``default_url`` returns the server's address without WANDB_BASE_URL; ``reachable`` is called
    only when there is a key.
    """
    if mode != "auto":
        return mode
    if env.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return env["WANDB_MODE"]
    base = env.get("WANDB_BASE_URL") or default_url()
    return "online" if _has_key(env, base) and reachable(base) else "offline"


def default_base_url() -> str:
    """The server that the W&B client uses by default, its settings files included."""
    try:
        import wandb

        return str(wandb.setup().settings.base_url)
    except Exception:  # a broken or missing client is reported when the W&B run starts
        return ""


def _has_key(env: Mapping[str, str], base_url: str) -> bool:
    if env.get("WANDB_API_KEY"):
        return True
    host = urlparse(base_url).hostname or ""
    try:
        return netrc.netrc(env.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


def is_reachable(base_url: str, timeout_s: float = 3.0) -> bool:
    """Whether the server accepts a connection. True behind a proxy, which W&B handles itself."""
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    url = urlparse(base_url)
    default_port = 443 if url.scheme == "https" else 80
    try:
        with socket.create_connection((url.hostname or "", url.port or default_port), timeout_s):
            return True
    except OSError:
        return False


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the values of keys that name a secret replaced by ``***``."""
    public: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            public[key] = without_secrets(value)
        elif value and str(key).lower().endswith(_SECRETS):
            public[key] = "***"
        else:
            public[key] = value
    return public


def _forget_failed_start() -> None:
    """Stop the client's service, which after a failed start refuses the run id to the next."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # or the next start looks for the service that is gone


class WandbRun:
    """The W&B run of one attempt. No method raises or waits without a bound."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        identity: WandbIdentity,
        mode: str = "auto",
        folder: Path | None = None,
    ) -> None:
        """``folder``: the parent of the attempt's ``wandb/`` folder (default: the run folder)."""
        self._run: Any = None
        self.identity = identity
        self.mode = choose_mode(mode, os.environ, is_reachable, default_base_url)
        self.url: str | None = None
        if self.mode == "disabled":
            return
        arguments: dict[str, Any] = {
            "dir": str(folder or run_dir),
            **asdict(identity),
            "config": without_secrets(config),
        }
        if self.mode == "online" and not self._init(arguments, "online"):
            self.mode = "offline"
            _forget_failed_start()
        if self.mode == "offline" and not self._init(arguments, "offline"):
            _forget_failed_start()
            self._init(arguments, "offline")

    def _init(self, arguments: dict[str, Any], mode: str) -> bool:
        try:
            import wandb

            settings = wandb.Settings(
                init_timeout=INIT_TIMEOUT_S,
                finish_timeout=FINISH_TIMEOUT_S,
                console="off",  # logs are in the run folder already
                silent=True,
                # It looks for a repository in the working directory; the banner records this one.
                x_disable_meta=True,
                save_code=False,
            )
            arguments |= {"mode": mode, "resume": "allow" if mode == "online" else None}
            self._run = wandb.init(**arguments, settings=settings)
            self._run.define_metric(STEP_AXIS)
            self._run.define_metric("*", step_metric=STEP_AXIS)
            self.url = self._run.url if mode == "online" else None
            return True
        except Exception as error:  # whatever W&B raises must not end the training
            self._stop(f"could not start ({mode})", error)
            return False

    @property
    def folder(self) -> Path | None:
        """This attempt's folder, for ``wandb sync``; None when W&B is off."""
        return Path(self._run.dir).parent if self._run is not None else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log on the axis ``training/global_step``: W&B's inner step must rise and would drop the
        steps that a resume takes again.
        """
        if self._run is None:
            return
        try:
            self._run.log({**metrics, STEP_AXIS: step})
        except Exception as error:
            self._stop("stopped taking metrics", error)

    def log_table(self, step: int, key: str, rows: list[dict[str, Any]]) -> None:
        """Log texts (generations of a validation) as a table; columns are those of the first
        row.
        """
        if self._run is None or not rows:
            return
        try:
            import wandb

            columns = list(rows[0])
            cells = [[row.get(column) for column in columns] for row in rows]
            table = wandb.Table(columns=columns, data=cells)
            self._run.log({key: table, STEP_AXIS: step})
        except Exception as error:
            self._stop("stopped taking tables", error)

    def finish(self, exit_code: int) -> None:
        """End the attempt; its state is ``finished`` for 0 and ``failed`` otherwise."""
        if self._run is None:
            return
        run = self._run
        self._run = None
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:
            self._stop("could not finish", error)

    def _stop(self, problem: str, error: Exception) -> None:
        """Log no more to W&B and say why."""
        self._run = None
        sys.stderr.write(
            f"[WARNING] W&B {problem}: {type(error).__name__}: {error}. The run goes on; "
            "metrics.jsonl has everything (python -m trainer.tracking.rebuild RUN makes the W&B "
            "run from it).\n"
        )
