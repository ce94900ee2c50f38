"""``data.*``: where samples come from and how long they may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.schema.base import Count, Section, Seed, Text, Whole

Files = Annotated[list[Text], Field(min_length=1)]


class Data(Section):
    """``data``."""

    task: Literal["arithmetic"] | None
    """A built-in task that needs no file. Replaces ``train_files`` and ``val_files``."""
    train_files: Text | Files | None
    """JSONL or Parquet files, folders or globs to train on."""
    val_files: Text | Files | None
    """The same to validate on."""
    prompt_key: Text
    """Field that holds the prompt: a text or a list of chat messages."""
    response_key: Text
    """Field that holds the answer to learn (SFT)."""
    answer_key: Text
    """Field that holds the right answer, handed to the reward (RL)."""
    data_source_key: Text
    """Field that names the data set, handed to the reward."""
    max_prompt_length: Count
    """Longest prompt, tokens."""
    max_response_length: Count
    """Longest response, tokens."""
    truncation: Literal["error", "left", "right", "middle"]
    """What happens to a prompt that is too long: refuse it, or cut tokens away on that side."""
    filter_overlong_prompts: bool
    """Leave out prompts that are too long instead of truncating them."""
    train_batch_size: Count
    """Prompts (RL) or samples (SFT) of one iteration, over all ranks."""
    val_batch_size: Count | None
    """Prompts validated at once, over all ranks. null: all."""
    train_max_samples: Count | None
    """Use only the first so many training samples. null: all."""
    val_max_samples: Count | None
    """Use only the first so many validation samples. null: all."""
    shuffle: bool
    """Shuffle the training samples anew each epoch."""
    seed: Seed
    """Seed of the shuffle."""
    num_workers: Whole
    """Loader processes of a rank, capped at the cores of the machine. 0: load in the training
    process.
    """
    prefetch_factor: Count
    """Batches that each loader process prepares ahead."""
    persistent_workers: bool
    """Keep the loader processes from one epoch to the next."""
    use_packed_dataset: bool
    """Ragged columns without padding. The only way there is."""
    system_prompt: str | None
    """System message put before prompts that are a plain text."""
    chat_template: str | None
    """Jinja template that replaces the tokenizer's own, or the path of a file that holds one."""
    apply_chat_template_kwargs: dict[str, Any]
    """Further arguments of the chat template, such as ``enable_thinking``."""
