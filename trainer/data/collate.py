"""From samples to the ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.data.batch import Batch
from trainer.data.example import Example


def to_sft_batch(examples: Sequence[Example]) -> Batch:
    """Prompts with their responses laid end to end.

    Columns ``input_ids`` int64 and ``loss_mask`` bool (True on response tokens with the end token),
    rows ``prompt_lengths`` int64 and ``ids`` int64 (index in the data set). Raises ValueError for a
    sample without response.
    """
    ids, masks = [], []
    for e in examples:
        if e.response_ids is None:
            raise ValueError(f"{e.place} was read without its response")
        ids.append(torch.tensor(e.prompt_ids + e.response_ids, dtype=torch.int64))
        mask = torch.ones(len(ids[-1]), dtype=torch.bool)
        mask[: len(e.prompt_ids)] = False
        masks.append(mask)
    return Batch.from_sequences(
        {"input_ids": ids, "loss_mask": masks},
        {
            "prompt_lengths": torch.tensor(
                [len(e.prompt_ids) for e in examples], dtype=torch.int64
            ),
            "ids": torch.tensor([e.index for e in examples], dtype=torch.int64),
        },
    )
