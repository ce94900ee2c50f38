"""Spans of time as a trace that Perfetto opens."""

from __future__ import annotations

import json

from trainer.base.spans import RankSpans, Span, since, trace_json
from trainer.ranks.waits import keep_no_waits, keep_waits, waiting
from trainer.tracking import Timers


def test_a_trace_has_a_process_a_rank_and_times_in_microseconds() -> None:
    spans = since(10.0, [Span("gen", 10.5, 12.0)])
    ranks = [RankSpans(rank, "n1", {"phases": spans, "exchanges": []}) for rank in (0, 1)]
    events = json.loads(trace_json(ranks))["traceEvents"]
    (first, second) = [event for event in events if event["ph"] == "X"]
    assert (first["ts"], first["dur"], first["name"]) == (500_000.0, 1_500_000.0, "gen")
    assert (first["pid"], second["pid"], first["tid"]) == (0, 1, 0)
    titles = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert titles == ["rank 0 (n1)", "phases", "exchanges", "rank 1 (n1)", "phases", "exchanges"]


def test_timers_and_exchanges_keep_spans_only_when_asked() -> None:
    times = iter(float(number) for number in range(100))
    timers = Timers(clock=lambda: next(times))
    with timers("gen"), waiting("all_reduce"):
        pass
    phases, waits = timers.keep_spans(), keep_waits()
    with timers("step"), timers("gen"), waiting("gather"):
        pass
    timers.keep_no_spans()
    keep_no_waits()
    with timers("gen"), waiting("barrier"):
        pass
    assert phases == [Span("gen", 3.0, 4.0), Span("step", 2.0, 5.0)]
    (wait,) = waits
    assert wait.name == "gather" and wait.end >= wait.start
