"""From examples to a ragged batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from trainer.data.batch import Batch
from trainer.data.example import Example


def to_sft_batch(examples: Sequence[Example]) -> Batch:
    """Prompts with their responses, laid end to end.

    Columns [tokens]: ``input_ids`` int64, ``loss_mask`` bool (True on the assistant's turns of the
    response with their end tokens). Rows [sequences]: ``prompt_lengths`` int64, ``ids`` int64
    (index in the data set). Raises ValueError for a sample without response.
    """
    ids = []
    masks = []
    for example in examples:
        if example.response_ids is None:
            raise ValueError(f"{example.location} was read without its response")
        tokens = example.prompt_ids + example.response_ids
        mask = torch.ones(len(tokens), dtype=torch.bool)
        mask[: len(example.prompt_ids)] = False
        if example.response_mask is not None:
            mask[len(example.prompt_ids) :] = torch.tensor(example.response_mask)
        ids.append(torch.tensor(tokens, dtype=torch.int64))
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
