"""Which lines of a run's record a logger has: ``<run>/loggers/NAME.jsonl``."""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path

from trainer.base.file_lock import is_locked_by_another
from trainer.base.json_files import Fields, is_count, is_text, read_lines
from trainer.base.run_folder import LOGGERS_FOLDER

_FIELDS: Fields = {"step": is_count, "kind": is_text, "id": is_text}


def journal_file(run_dir: Path, name: str) -> Path:
    """The journal of one logger."""
    return run_dir / LOGGERS_FOLDER / f"{name}.jsonl"


class SentLines:
    """The journal; holds its lock, since one process at a time sends to a logger."""

    def __init__(self, run_dir: Path, name: str) -> None:
        """Raises BlockingIOError while another process sends, OSError where it can't be written."""
        path = journal_file(run_dir, name)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        if is_locked_by_another(self._fd):
            os.close(self._fd)
            raise BlockingIOError(f"another process is sending this run to {name}")
        self.id: str | None = None
        """What the logger calls the run; None before it has begun."""
        self._sent: Counter[tuple[int, str]] = Counter()
        for line in read_lines(path, _FIELDS):
            if "id" in line:
                self.id = line["id"]
            elif "step" in line and "kind" in line:
                self._sent[line["step"], line["kind"]] += 1

    def has(self, step: int, kind: str, index: int) -> bool:
        """Whether the logger has line ``index`` (from 0) of this kind and step."""
        return index < self._sent[step, kind]

    def set_id(self, run_id: str) -> None:
        """Note what the logger calls the run."""
        if run_id != self.id:
            self.id = run_id
            self._append({"id": run_id})

    def add(self, step: int, kind: str) -> None:
        """Note that the logger has one more line."""
        self._sent[step, kind] += 1
        self._append({"step": step, "kind": kind})

    def _append(self, line: dict[str, object]) -> None:
        os.write(self._fd, (json.dumps(line) + "\n").encode())

    def close(self) -> None:
        """Let other processes send."""
        os.close(self._fd)
