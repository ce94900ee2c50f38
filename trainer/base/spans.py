"""Spans of time, and the trace file that shows them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

MICROSECONDS = 1_000_000


@dataclass(frozen=True)
class Span:
    """What ran from ``start`` to ``end``, seconds of ``time.perf_counter``."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class RankSpans:
    """The spans of one rank in one step, as seconds since a barrier at the beginning of the step:
    clocks of machines differ.
    """

    rank: int
    host: str
    lanes: Mapping[str, Sequence[Span]]
    """Title -> spans that are shown in one row; spans of a row lie inside each other or apart."""


def since(start: float, spans: Iterable[Span]) -> list[Span]:
    """The spans with times that count from ``start``."""
    return [Span(span.name, span.start - start, span.end - start) for span in spans]


def trace_json(ranks: Iterable[RankSpans]) -> str:
    """A trace in Chrome's format, which https://ui.perfetto.dev and chrome://tracing open: one
    process a rank, one thread a lane, times in microseconds.
    """
    events: list[dict[str, object]] = []
    for rank in ranks:
        title = f"rank {rank.rank} ({rank.host})"
        events.append(_name("process_name", rank.rank, 0, title))
        for number, (lane, spans) in enumerate(rank.lanes.items()):
            events.append(_name("thread_name", rank.rank, number, lane))
            events += [_event(span, rank.rank, number) for span in spans]
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"})


def _event(span: Span, rank: int, lane: int) -> dict[str, object]:
    return {
        "ph": "X",
        "name": span.name,
        "pid": rank,
        "tid": lane,
        "ts": round(span.start * MICROSECONDS, 3),
        "dur": round((span.end - span.start) * MICROSECONDS, 3),
    }


def _name(kind: str, rank: int, lane: int, title: str) -> dict[str, object]:
    return {"ph": "M", "name": kind, "pid": rank, "tid": lane, "args": {"name": title}}
