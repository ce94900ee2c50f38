"""The W&B view of a run. It is a view: if it fails the run goes on, and it can be rebuilt from
``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import json
import netrc
import os
import secrets
import socket
import string
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

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
class Identity:
    """What makes several attempts one run for W&B; kept in ``<run>/wandb.json``."""

    id: str
    project: str
    name: str
    group: str | None


def persistent_identity(run_dir: Path, project: str, name: str, group: str | None) -> Identity:
    """The run's identity: that of its first attempt, or a new one, written down before any init.

    Without ``group``, WANDB_RUN_GROUP (a sweep sets it) is the group.
    """
    if (found := stored_identity(run_dir)) is not None:
        return found
    new = Identity(random_run_id(), project, name, group or os.environ.get("WANDB_RUN_GROUP"))
    keep_identity(run_dir, new)
    return new


def keep_identity(run_dir: Path, identity: Identity) -> None:
    """Write ``<run>/wandb.json``, whole and durable."""
    fd, temporary = tempfile.mkstemp(dir=run_dir, prefix=IDENTITY_FILE)
    with open(fd, "w") as file:
        json.dump(asdict(identity), file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, run_dir / IDENTITY_FILE)


def stored_identity(run_dir: Path) -> Identity | None:
    """What ``<run>/wandb.json`` says; None when it isn't there or was cut short."""
    try:
        return Identity(**json.loads((run_dir / IDENTITY_FILE).read_text()))
    except (OSError, ValueError, TypeError):
        return None


def random_run_id() -> str:
    """Eight letters and digits, as W&B itself makes them; independent of the run's seeded
    generators.
    """
    return "".join(secrets.choice(string.ascii_lowercase + string.digits) for _ in range(8))


def choose_mode(
    wanted: str,
    env: Mapping[str, str],
    reachable: Callable[[str], bool],
    default_url: Callable[[], str],
) -> str:
    """``online``, ``offline`` or ``disabled``. ``auto``: WANDB_MODE, else online only with a key
    and a network.

    ``default_url``: the server when WANDB_BASE_URL doesn't say; ``reachable`` is asked only when
    there is a key.
    """
    if wanted != "auto":
        return wanted
    if env.get("WANDB_MODE") in ("online", "offline", "disabled"):
        return env["WANDB_MODE"]
    base = env.get("WANDB_BASE_URL") or default_url()
    return "online" if _has_key(env, base) and reachable(base) else "offline"


def default_base_url() -> str:
    """The server that this version of the client talks to unless told otherwise (also by its
    settings files).
    """
    try:
        import wandb

        return str(wandb.setup().settings.base_url)
    except Exception:  # a broken or missing client is reported by the start itself
        return ""


def _has_key(env: Mapping[str, str], base_url: str) -> bool:
    if env.get("WANDB_API_KEY"):
        return True
    try:
        return (
            netrc.netrc(env.get("NETRC")).authenticators(urlparse(base_url).hostname or "")
            is not None
        )
    except (OSError, netrc.NetrcParseError):
        return False


def is_reachable(base_url: str, timeout_s: float = 3.0) -> bool:
    """Does the server accept a connection (or stand a proxy before it, which is W&B's own
    business)?
    """
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        return True
    url = urlparse(base_url)
    try:
        with socket.create_connection(
            (url.hostname or "", url.port or (443 if url.scheme == "https" else 80)), timeout_s
        ):
            return True
    except OSError:
        return False


def without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    """``config`` with the values of keys that name a secret replaced by ``***``."""
    return {
        k: without_secrets(v)
        if isinstance(v, Mapping)
        else "***"
        if str(k).lower().endswith(_SECRETS) and v
        else v
        for k, v in config.items()
    }


def _forget_failed_start() -> None:
    """After a failed start the client's service holds on to the run id and refuses it to the next
    start.
    """
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # or the next start looks for the service that is gone


class WandbRun:
    """One attempt of a run, as W&B sees it. No method raises or waits without a bound."""

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        identity: Identity,
        mode: str = "auto",
        folder: Path | None = None,
    ) -> None:
        """``folder``: where the attempt's ``wandb/`` folder goes (the run folder unless told)."""
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
                # looks for a repository in the working directory; the banner records ours
                x_disable_meta=True,
                save_code=False,
            )
            arguments |= {"mode": mode, "resume": "allow" if mode == "online" else None}
            self._run = wandb.init(**arguments, settings=settings)
            self._run.define_metric(STEP_AXIS)
            self._run.define_metric("*", step_metric=STEP_AXIS)
            self.url = self._run.url if mode == "online" else None
            return True
        except Exception as error:  # whatever W&B throws: the run matters more than its view
            self._give_up(f"could not start ({mode})", error)
            return False

    @property
    def folder(self) -> Path | None:
        """This attempt's folder, for ``wandb sync``; None when W&B is off."""
        return Path(self._run.dir).parent if self._run is not None else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log on our own step axis: W&B's inner step must rise and would drop the steps that a
        resume does again.
        """
        if self._run is None:
            return
        try:
            self._run.log({**metrics, STEP_AXIS: step})
        except Exception as error:
            self._give_up("stopped taking metrics", error)

    def log_table(self, step: int, key: str, rows: list[dict[str, Any]]) -> None:
        """Log texts (generations of a validation) as a table; columns are those of the first
        row.
        """
        if self._run is None or not rows:
            return
        try:
            import wandb

            columns = list(rows[0])
            table = wandb.Table(
                columns=columns, data=[[row.get(c) for c in columns] for row in rows]
            )
            self._run.log({key: table, STEP_AXIS: step})
        except Exception as error:
            self._give_up("stopped taking tables", error)

    def finish(self, exit_code: int) -> None:
        """End the attempt; its state is ``finished`` for 0 and ``failed`` otherwise."""
        if self._run is None:
            return
        run, self._run = self._run, None
        try:
            run.finish(exit_code=exit_code)
        except Exception as error:
            self._give_up("could not finish", error)

    def _give_up(self, what: str, error: Exception) -> None:
        self._run = None
        sys.stderr.write(
            f"[WARNING] W&B {what}: {type(error).__name__}: {error}. The run goes on; "
            "metrics.jsonl has everything "
            "(python -m trainer.tracking.rebuild RUN makes the W&B run from it).\n"
        )
