"""One run as a page for a terminal: progress, curves, phases, memory, checkpoint, samples. Pure but
for reading the run's folder.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from jobs.run_state import COMPLETED, RunState
from jobs.view.columns import cut
from jobs.view.table import COLOUR
from trainer.base.json_files import is_number, read_bytes, read_lines
from trainer.base.metrics_file import METRICS_FILE, by_step

CURVES = {
    "reward": ("critic/score/mean",),
    "validation": ("val/reward",),
    "loss": ("actor/pg_loss", "train/nll"),
    "grad norm": ("actor/grad_norm", "train/grad_norm"),
    "entropy": ("actor/entropy",),
    "length": ("response_length/mean",),
    "tokens/s": ("perf/throughput", "perf/tokens_per_second"),
    "fill ratio": ("batch/fill_ratio",),
}
"""Title -> the metrics of which the first that the run has is drawn."""
MEMORY = {
    "GPU, peak": "perf/max_memory_allocated_gb",
    "host": "perf/cpu_memory_used_gb",
}
LEVELS = "▁▂▃▄▅▆▇█"
MOST_PHASES = 8
SAMPLES = 2
ETA_STEPS = 20
"""Steps whose mean time tells how long the rest takes."""


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run's folder says, read anew for each frame."""

    steps: Mapping[int, Mapping[str, Any]]
    total_steps: int | None
    """Where the settings have it."""
    committed: int | None
    """Step of the newest checkpoint."""
    samples: Sequence[Mapping[str, Any]]
    """Texts of the newest validation."""


def read_record(run: Path) -> RunRecord:
    """Read metrics, settings, checkpoints and samples; what is missing is left out."""
    names = [path.parent.name for path in (run / "checkpoints").glob("step_*/manifest.json")]
    saved = [int(name.removeprefix("step_")) for name in names if name[5:].isdecimal()]
    texts = [
        path for path in (run / "generations").glob("step_*.jsonl") if path.stem[5:].isdecimal()
    ]
    newest = max(texts, key=lambda path: int(path.stem[5:]), default=None)
    return RunRecord(
        steps=by_step(run / METRICS_FILE),
        total_steps=_total_steps(run),
        committed=max(saved, default=None),
        samples=[] if newest is None else read_lines(newest)[:SAMPLES],
    )


def page(
    name: str, state: RunState | None, record: RunRecord, width: int, now: float | None = None
) -> RenderableType:
    """The page in ``width`` characters. ``now``: seconds since the epoch."""
    parts: list[RenderableType] = [_head(name, state, width), *_progress(record, width, now)]
    if not record.steps:
        parts.append(Text("no step is done yet"))
        return Group(*parts)
    parts += [Text(), _curves(record.steps, width), Text(), _phases(record.steps, width)]
    parts.append(_below(record))
    parts += _samples(record.samples, width)
    return Group(*parts)


def sparkline(values: Sequence[float], width: int) -> str:
    """The values as blocks, at most ``width`` of them: each the mean of its share of the values. A
    value that is not finite is ``!``, and one block stands for all where values are equal.
    """
    bins = min(width, len(values))
    shares = [values[i * len(values) // bins : (i + 1) * len(values) // bins] for i in range(bins)]
    means = [sum(share) / len(share) for share in shares]
    finite = [mean for mean in means if is_number(mean)]
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low
    top = len(LEVELS) - 1
    blocks = []
    for mean in means:
        if not is_number(mean):
            blocks.append("!")
        else:
            blocks.append(LEVELS[round((mean - low) / span * top) if span > 0 else 0])
    return "".join(blocks)


def eta_s(steps: Mapping[int, Mapping[str, Any]], total: int) -> float | None:
    """Seconds that the rest takes, from the mean of the last steps; None before two of them."""
    marks = [
        (step, float(row["time"])) for step, row in steps.items() if is_number(row.get("time"))
    ]
    marks = marks[-ETA_STEPS - 1 :]
    if len(marks) < 2 or marks[-1][0] == marks[0][0]:
        return None
    step_s = (marks[-1][1] - marks[0][1]) / (marks[-1][0] - marks[0][0])
    return max(0.0, step_s * (total - marks[-1][0]))


def _head(name: str, state: RunState | None, width: int) -> Text:
    if state is None:
        return Text(cut(name, width, in_front=True), style="bold")
    text = Text(cut(name, max(12, width - 40), in_front=True), style="bold")
    text.append(f"  {state.state}", style=COLOUR.get(state.state, ""))
    if state.attempt:
        text.append(f"  attempt {state.attempt}")
    if state.reason and state.state != COMPLETED:
        text.append("  " + cut(state.reason, max(8, width - len(text) - 2)))
    return text


def _progress(record: RunRecord, width: int, now: float | None) -> list[RenderableType]:
    step = max(record.steps, default=0)
    total = record.total_steps
    words = [f"step {step}" if total is None else f"step {step}/{total}"]
    if total is not None:
        left = eta_s(record.steps, total)
        if left is not None and step < total:
            words.append(f"about {duration(left)} left")
    newest = record.steps.get(step, {}).get("time")
    if is_number(newest):
        age = (time.time() if now is None else now) - float(newest or 0.0)
        words.append(f"{duration(max(0.0, age))} ago")
    if record.committed is not None:
        words.append(f"saved at step {record.committed}")
    line = Text(cut(" · ".join(words), width))
    if total is None:
        return [line]
    return [line, ProgressBar(total=total, completed=min(step, total), width=min(width, 60))]


def _curves(steps: Mapping[int, Mapping[str, Any]], width: int) -> Table:
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True, style="dim")
    room = max(8, width - 46)
    for title, names in CURVES.items():
        found = [name for name in names if any(name in row for row in steps.values())]
        if not found:
            continue
        values = [float(row[found[0]]) for row in steps.values() if _is_value(row.get(found[0]))]
        if not values:
            continue
        finite = [value for value in values if is_number(value)]
        span = f"{min(finite):.4g} … {max(finite):.4g}" if finite else ""
        table.add_row(title, f"{values[-1]:.4g}", sparkline(values, room), span)
    return table


def _phases(steps: Mapping[int, Mapping[str, Any]], width: int) -> Table:
    """The phases of the newest step that was timed, the longest first."""
    timed = [row for row in steps.values() if is_number(row.get("timing/step"))]
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    if not timed:
        return table
    row = timed[-1]
    whole = float(row["timing/step"])
    phases = {
        name.removeprefix("timing/"): float(value)
        for name, value in row.items()
        if name.startswith("timing/") and name.count("/") == 1 and is_number(value)
    }
    phases.pop("reshard_share", None)
    table.add_row("step", f"{whole:.2f} s", "")
    room = max(8, min(40, width - 34))
    del phases["step"]
    for name, seconds in sorted(phases.items(), key=lambda item: -item[1])[:MOST_PHASES]:
        share = min(1.0, seconds / whole) if whole else 0.0
        table.add_row(f"  {name}", f"{seconds:.2f} s", "█" * round(share * room))
    return table


def _below(record: RunRecord) -> Text:
    newest: dict[str, Any] = {}
    for row in record.steps.values():
        newest.update(row)
    words = [
        f"{title} {float(newest[name]):.2f} GiB"
        for title, name in MEMORY.items()
        if is_number(newest.get(name))
    ]
    if is_number(newest.get("goodput/ettr")):
        words.append(f"goodput {float(newest['goodput/ettr']):.0%}")
    return Text("memory: " + " · ".join(words) if words else "")


def _samples(samples: Sequence[Mapping[str, Any]], width: int) -> list[Text]:
    lines = []
    for sample in samples:
        prompt = " ".join(str(sample.get("prompt", "")).split())
        response = " ".join(str(sample.get("response", "")).split())
        score = sample.get("score")
        shown = f"{score:.3g}" if is_number(score) else "?"
        lines.append(Text(cut(f"{prompt}", width), style="dim"))
        lines.append(Text(cut(f"  {shown}: {response}", width)))
    return lines


def _total_steps(run: Path) -> int | None:
    data = read_bytes(run / "config.yaml")
    try:
        total = yaml.safe_load(data or b"")["trainer"]["total_training_steps"]
    except (yaml.YAMLError, KeyError, TypeError, ValueError):
        return None
    return total if isinstance(total, int) and total > 0 else None


def _is_value(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def duration(seconds: float) -> str:
    """``42s``, ``3m05s``, ``2h07m``."""
    whole = round(seconds)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
