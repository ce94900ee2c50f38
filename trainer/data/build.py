"""From the ``data`` section to a data set and its loader."""

from __future__ import annotations

from typing import Any, Literal

from trainer.base.errors import UserError
from trainer.config.schema.data import Data
from trainer.data.arithmetic import ArithmeticDataset, ArithmeticSettings
from trainer.data.dataset import Dataset, FileDataset
from trainer.data.encode import Encoder, EncodeSettings
from trainer.data.fields import Keys
from trainer.data.files import expand
from trainer.data.loader import Loader, worker_count

Split = Literal["train", "val"]


def make_dataset(
    data: Data,
    tokenizer: Any,
    *,
    split: Split,
    mode: Literal["sft", "rl"],
    vocabulary: int | None = None,
    answer_required: bool | None = None,
    arithmetic: ArithmeticSettings | None = None,
    local_ranks: int = 1,
) -> Dataset | None:
    """The training or validation data; None when validation has none.

    ``vocabulary`` is the model's. ``answer_required`` (default: in RL) makes a row without a right
    answer an error; pass False when a user's reward function does without. Raises UserError for
    anything wrong with keys or files.
    """
    encoder = Encoder(
        tokenizer,
        EncodeSettings(
            max_prompt_length=data.max_prompt_length,
            max_response_length=data.max_response_length,
            truncation=data.truncation,
            system_prompt=data.system_prompt,
            chat_template=data.chat_template,
            template_kwargs=dict(data.apply_chat_template_kwargs),
            vocabulary=vocabulary,
        ),
    )
    limit = data.train_max_samples if split == "train" else data.val_max_samples
    if data.task == "arithmetic":
        return ArithmeticDataset(
            encoder,
            split=split,
            seed=data.seed,
            with_response=mode == "sft",
            limit=limit,
            settings=arithmetic,
        )
    key = f"data.{split}_files"
    patterns = data.train_files if split == "train" else data.val_files
    if not patterns:
        if split == "val":
            return None
        raise UserError(
            f"{key} is not set; name a file, or type data.task=arithmetic to try without one"
        )
    keys = Keys(
        prompt=data.prompt_key,
        response=data.response_key if mode == "sft" else None,
        answer=data.answer_key,
        answer_required=mode == "rl" if answer_required is None else answer_required,
        data_source=data.data_source_key,
    )
    return FileDataset(
        expand(patterns, key),
        keys,
        encoder,
        key=key,
        limit=limit,
        filter_prompts=data.filter_overlong_prompts,
        num_workers=worker_count(data.num_workers, local_ranks),
    )


def make_loader(data: Data, dataset: Dataset, *, split: Split, local_ranks: int = 1) -> Loader:
    """The loader of a data set: training shuffles (``data.shuffle``) and drops what fills no batch;
    validation goes through all samples once, in order, loaded in this process.
    """
    if split == "val":
        return Loader(
            dataset,
            batch_size=data.val_batch_size or len(dataset),
            seed=data.seed,
            shuffle=False,
            drop_last=False,
        )
    return Loader(
        dataset,
        batch_size=data.train_batch_size,
        seed=data.seed,
        shuffle=data.shuffle,
        num_workers=worker_count(data.num_workers, local_ranks),
        prefetch_factor=data.prefetch_factor,
        persistent_workers=data.persistent_workers,
    )
