"""TensorBoard: event files in ``<run>/tensorboard``, or below TENSORBOARD_DIR."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from trainer.tracking.loggers.logger import LoggedRun, markdown_table


def check(env: Mapping[str, str]) -> str | None:
    """What keeps the logger from starting: nothing."""
    return None


class TensorBoardLogger:
    """See :class:`trainer.tracking.loggers.logger.Logger`."""

    def __init__(self, run: LoggedRun) -> None:
        """Each process writes a file of its own into the folder; TensorBoard shows them as one
        run.
        """
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._folder = run.id or str(_folder_of(run))
        self._writer = EventFileWriter(self._folder)
        if run.id is None:
            text = yaml.safe_dump(dict(run.config), sort_keys=False, allow_unicode=True)
            self._add_text("config", "    " + text.replace("\n", "\n    "), 0, 0.0)

    @property
    def id(self) -> str:
        """The folder."""
        return self._folder

    def log(self, step: int, metrics: Mapping[str, float], time_s: float) -> None:
        """Write one event with all numbers; TensorBoard holds them as float32."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        values = [Summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        self._add(Summary(value=values), step, time_s)

    def log_table(self, step: int, rows: Sequence[Mapping[str, Any]], time_s: float) -> None:
        """Write a table of the text plugin."""
        self._add_text("val/generations", markdown_table(rows), step, time_s)

    def flush(self) -> None:
        """Write what is queued."""
        self._writer.flush()

    def close(self, exit_code: int | None) -> None:
        """Close the file."""
        self._writer.close()

    def _add_text(self, tag: str, text: str, step: int, time_s: float) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary, SummaryMetadata
        from tensorboard.compat.proto.tensor_pb2 import TensorProto
        from tensorboard.compat.proto.tensor_shape_pb2 import TensorShapeProto

        plugin = SummaryMetadata.PluginData(plugin_name="text")
        tensor = TensorProto(
            dtype="DT_STRING",
            string_val=[text.encode()],
            tensor_shape=TensorShapeProto(dim=[TensorShapeProto.Dim(size=1)]),
        )
        value = Summary.Value(tag=tag, metadata=SummaryMetadata(plugin_data=plugin), tensor=tensor)
        self._add(Summary(value=[value]), step, time_s)

    def _add(self, summary: Any, step: int, time_s: float) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._writer.add_event(Event(step=step, wall_time=time_s, summary=summary))


def _folder_of(run: LoggedRun) -> Path:
    parent = os.environ.get("TENSORBOARD_DIR")
    if not parent:
        return run.folder / "tensorboard"
    return Path(parent) / run.project / run.name
