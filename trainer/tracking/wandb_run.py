"""The W&B run of a training run.

It is a view: when W&B fails the training goes on, and the W&B run can be made again from
``metrics.jsonl``.
"""

from __future__ import annotations

import contextlib
import netrc
import os
import secrets
import shlex
import shutil
import socket
import string
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlparse

from trainer.base import atomic
from trainer.base.errors import first_line
from trainer.base.full_disk import WAIT_S
from trainer.base.json_files import Fields, is_text, optional, read_object
from trainer.base.masking import mask_values
from trainer.base.run_folder import WANDB_IDENTITY, upload_command
from trainer.tracking.wandb_rows import METRICS, TABLE, Row, RunRecord, SentRows

STEP_AXIS = "training/global_step"
MODES = ("auto", "online", "offline", "disabled")
TABLE_NAME = "val/generations"
MAX_RESTARTS = 3
"""How often in an attempt W&B's service is started again after it was lost."""
INIT_TIMEOUT_S = 60.0
FINISH_TIMEOUT_S = 120.0


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
    atomic.write_json(run_dir / WANDB_IDENTITY, asdict(identity), wait_s=WAIT_S)


def load_identity(run_dir: Path) -> WandbIdentity | None:
    """The identity in ``<run>/wandb.json``; None when it isn't there or was cut short."""
    values = read_object(run_dir / WANDB_IDENTITY, _IDENTITY_FIELDS)
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


class WandbRun:
    """The W&B run of one attempt. No method raises or waits without a bound.

    Metrics go through a process of W&B's own, its service. Slurm sends TERM to every process of a
    job that is to stop, and the service then exits at once without what it holds (it installs a
    handler of its own, so neither blocking nor ignoring the signal keeps it). When it is gone, a
    new one is started and given again what the record has.
    """

    def __init__(
        self,
        run_dir: Path,
        config: Mapping[str, Any],
        *,
        identity: WandbIdentity,
        mode: str = "auto",
        folder: Path | None = None,
        record: RunRecord | None = None,
        fallback: bool = True,
    ) -> None:
        """``folder``: the parent of the attempt's ``wandb/`` folder (default: the run folder).
        ``fallback``: go offline when the server can't be used.

        ``record``: what the run has recorded, to be given again to a new service, and online what
        the server lacks of it. Without it a lost service ends the logging.
        """
        self._run: Any = None
        self._run_dir = run_dir
        self._record = record
        self._sent: SentRows | None = None
        self._lines: Counter[tuple[int, str]] = Counter()
        self._restarts = 0
        self.sent_rows = 0
        """Rows that were handed to W&B."""
        self.identity = identity
        self.mode = choose_mode(mode, os.environ, is_reachable, default_base_url)
        self.url: str | None = None
        if self.mode == "disabled":
            return
        self._arguments: dict[str, Any] = {
            "dir": str(folder or run_dir),
            **asdict(identity),
            "config": mask_values(config),
        }
        if self.mode == "online" and not self._start("online"):
            self.mode = "offline" if fallback else "disabled"
            _forget_service()
        if self.mode == "offline" and not self._start("offline"):
            _forget_service()
            self._start("offline")

    def _start(self, mode: str) -> bool:
        try:
            self._init(mode)
            return True
        except Exception as error:  # whatever W&B raises must not end the training
            self._give_up(f"could not start ({mode})", error)
            return False

    def _init(self, mode: str) -> None:
        import wandb

        online = mode == "online"
        if online and self._record is not None and self._sent is None:
            self._sent = SentRows(self._run_dir, self.identity.id)
        settings = wandb.Settings(
            init_timeout=INIT_TIMEOUT_S,
            finish_timeout=FINISH_TIMEOUT_S,
            console="off",  # logs are in the run folder already
            silent=True,
            # It looks for a repository in the working directory; the banner records this one.
            x_disable_meta=True,
            save_code=False,
            reinit="create_new",  # the run of a service that is gone counts as active
        )
        how: dict[str, Any] = {"mode": mode, "resume": "allow" if online else None}
        self._run = wandb.init(**self._arguments, **how, settings=settings)
        self._run.define_metric(STEP_AXIS)
        self._run.define_metric("*", step_metric=STEP_AXIS)
        self.url = self._run.url if online else None
        if self._record is None:
            return
        if self._sent is not None:
            self._sent.begin(int(self._run.starting_step), _step_of(self._run.summary))
            self._catch_up(self._record.rows())
        elif self._restarts:
            self._catch_up(self._record.rows(self._record.start))

    def _catch_up(self, rows: Iterable[Row]) -> None:
        """Hand the recorded ``rows`` to W&B, without those that the server has."""
        self._lines.clear()
        for row in rows:
            self._send(row)

    def _send(self, row: Row) -> None:
        """Hand ``row`` to W&B unless the server has it. Raises what W&B raises."""
        key = (row.step, row.kind)
        index = self._lines[key]
        self._lines[key] += 1
        if self._sent is not None and self._sent.has(row.step, row.kind, index):
            return
        if row.kind == TABLE:
            if not self._takes_table(row):
                return
        else:
            self._run.log({**row.values, STEP_AXIS: row.step})
        self.sent_rows += 1
        if self._sent is not None:
            self._sent.add(row.step, row.kind)

    def _takes_table(self, row: Row) -> bool:
        """Hand a table to W&B; False, with a warning, for one that it refuses: metrics go on."""
        try:
            self._run.log({TABLE_NAME: _table(row.values), STEP_AXIS: row.step})
        except ConnectionError:  # the service is gone
            raise
        except Exception as error:
            sys.stderr.write(
                f"[WARNING] W&B took no table of step {row.step}: {type(error).__name__}: "
                f"{first_line(error)}. It is in generations/.\n"
            )
            return False
        return True

    @property
    def folder(self) -> Path | None:
        """This attempt's folder, for ``wandb sync``; None when W&B is off."""
        return Path(self._run.dir).parent if self._run is not None else None

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Log on the axis ``training/global_step``: W&B's inner step must rise and would drop the
        steps that a resume takes again. Online, a step that the server has is not sent again.

        ``metrics`` must be in the record already.
        """
        self._log(Row(step, METRICS, metrics), "stopped taking metrics")

    def log_table(self, step: int, rows: list[dict[str, Any]]) -> None:
        """Log texts (generations of a validation) as a table; columns are those of the first
        row.
        """
        if rows:
            self._log(Row(step, TABLE, rows), "stopped taking tables")

    def _log(self, row: Row, problem: str) -> None:
        if self._run is None:
            return
        try:
            self._send(row)
        except Exception as error:
            self._restart(problem, error)
            if row.kind == TABLE and self._lines[row.step, TABLE] == 0:
                self._log(row, problem)  # a table comes before the line of its step

    def alert(self, title: str, text: str) -> None:
        """Send an alert; one that W&B doesn't take is only told."""
        if self._run is None:
            return
        try:
            self._run.alert(title=title, text=text)
        except Exception as error:  # whatever W&B raises must not end the training
            sys.stderr.write(f"[WARNING] W&B took no alert: {first_line(error)}\n")

    def finish(self, exit_code: int) -> None:
        """End the attempt; its state is ``finished`` for 0 and ``failed`` otherwise."""
        while self._run is not None:
            run = self._run
            try:
                run.finish(exit_code=exit_code)
                self._run = None
            except Exception as error:
                self._restart("could not finish", error)
        self._release()

    def _restart(self, problem: str, error: Exception) -> None:
        """Start another service and give it what the record has; give up after some times."""
        lost = self.folder
        while self._record is not None and self._restarts < MAX_RESTARTS:
            self._restarts += 1
            _stop_status_threads(self._run)
            _forget_service()
            try:
                self._init(self.mode)
            except Exception as again:
                error = again
                if self.mode == "online":  # each try would wait for the server
                    break
                continue
            if self.mode == "offline" and lost is not None and lost != self.folder:
                shutil.rmtree(lost, ignore_errors=True)  # the new folder holds all of it
            return
        self._give_up(problem, error)

    def _give_up(self, problem: str, error: Exception) -> None:
        """Log no more to W&B and say why."""
        self._run = None
        self._release()
        sys.stderr.write(
            f"[WARNING] W&B {problem}: {type(error).__name__}: {error}. The run goes on; "
            "metrics.jsonl has everything; to send it to W&B, type "
            f"{shlex.join(upload_command(self._run_dir))}\n"
        )

    def _release(self) -> None:
        if self._sent is not None:
            self._sent.close()
            self._sent = None


def _step_of(summary: Any) -> int | None:
    """The step of the newest row that the server has; None when it has none."""
    step = summary.get(STEP_AXIS)
    return int(step) if isinstance(step, int | float) else None


def _table(rows: list[dict[str, Any]]) -> Any:
    import wandb

    columns = list(rows[0])
    return wandb.Table(columns=columns, data=[[row.get(name) for name in columns] for row in rows])


def _stop_status_threads(run: Any) -> None:
    """Stop the client's threads that ask the service about ``run``: they would each end with a
    traceback once it is gone.
    """
    with contextlib.suppress(Exception):
        run._run_status_checker.stop()


def _forget_service() -> None:
    """Stop the client's service, which after a failed start refuses the run id to the next."""
    with contextlib.suppress(Exception):
        import wandb

        wandb.teardown()
    os.environ.pop("WANDB_SERVICE", None)  # or the next start looks for the service that is gone
