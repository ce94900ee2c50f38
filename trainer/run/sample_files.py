"""Responses of training and validation as text files, one a step: ``trainer.rollout_data_dir`` and
``trainer.validation_data_dir``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainer.base import atomic
from trainer.base.metrics_file import to_plain
from trainer.data import Example
from trainer.experience.sampler import Rollouts
from trainer.ranks.world import World
from trainer.tracking.optional_output import optional_output


def sample_rows(
    rollouts: Rollouts, examples: Sequence[Example], tokenizer: Any, step: int
) -> list[dict[str, Any]]:
    """One row for each response, under verl's names: ``input``, ``output``, ``gts`` (the ground
    truth), ``score``, ``step`` and the parts of the reward, which give way to these.

    ``examples``: by index of ``rollouts.prompt_indices``.
    """
    inputs: dict[int, str] = {}
    rows = []
    responses = zip(
        rollouts.prompt_indices, rollouts.samples, rollouts.scores, rollouts.texts, strict=True
    )
    for index, sample, score, text in responses:
        example = examples[index]
        if index not in inputs:
            inputs[index] = tokenizer.decode(example.prompt_ids)
        row: dict[str, Any] = dict(score.extra)
        row |= {
            "input": inputs[index],
            "output": text,
            "gts": example.ground_truth,
            "score": score.value,
            "step": step,
            "data_source": example.data_source,
            "index": example.index,
            "response_length": len(sample.response_ids),
            "finish_reason": sample.finish_reason,
        }
        if score.failed:
            row["reward_error"] = score.failed
        rows.append(row)
    return rows


def write_samples(
    folder: Path,
    step: int,
    rows: Sequence[Mapping[str, Any]],
    world: World,
    tell: Callable[[str], None],
) -> None:
    """Write the rows of all ranks as ``FOLDER/STEP.jsonl``, whole; a step that is taken again
    replaces its file. Collective.

    Rows come in the order of the data, whichever rank had them. A disk that doesn't take them is
    told, and the run goes on.
    """
    parts = world.gather([json.dumps(row, ensure_ascii=False, default=_plain) for row in rows])
    if not world.is_main:
        return
    lines = [line for part in parts for line in part]
    lines.sort(key=lambda line: int(json.loads(line)["index"]))
    path = folder / f"{step}.jsonl"
    with optional_output(str(path), tell):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        atomic.write_text(path, "".join(f"{line}\n" for line in lines), durable=False)


def _plain(value: Any) -> Any:
    try:
        return to_plain(value)
    except TypeError:
        return str(value)
