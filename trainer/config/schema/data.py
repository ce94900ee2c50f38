"""``data.*``: where samples come from and how long they may be."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from trainer.config.schema.base import Count, Section, Seed, Text, Whole
from trainer.config.schema.markers import LOCAL_PATH, MAY_CHANGE, USER_TEXT, NoEffect

Files = Annotated[list[Text], Field(min_length=1)]


NO_LOADER_PROCESSES = NoEffect(
    "data.num_workers", (0,), "loads in the training process: set it to 1 or more"
)
OVERLONG_PROMPTS_LEFT_OUT = NoEffect(
    "data.filter_overlong_prompts",
    (True,),
    "leaves such prompts out: set it to false",
    and_also={"trainer.mode": "rl"},  # SFT cuts responses, too
)


class Data(Section):
    """``data``."""

    task: Literal["arithmetic"] | None
    """A built-in task that needs no file. Replaces ``train_files`` and ``val_files``."""
    train_files: Annotated[Text | Files | None, LOCAL_PATH]
    """JSONL or Parquet files, folders or globs to train on."""
    val_files: Annotated[Text | Files | None, LOCAL_PATH, MAY_CHANGE]
    """JSONL or Parquet files, folders or globs to validate on."""
    prompt_key: Text
    """Field that holds the prompt: a text or a list of chat messages; in SFT also a whole
    conversation.
    """
    response_key: Text
    """Field that holds the answer to learn (SFT): a text or a list of chat messages."""
    answer_key: Text
    """Field that holds the right answer, handed to the reward (RL)."""
    data_source_key: Text
    """Field that names the data set, handed to the reward."""
    max_prompt_length: Count
    """Longest prompt, tokens."""
    max_response_length: Count
    """Longest response, tokens."""
    truncation: Annotated[Literal["error", "left", "right", "middle"], OVERLONG_PROMPTS_LEFT_OUT]
    """What happens to a prompt that is too long: refuse it, or cut tokens away on that side."""
    filter_overlong_prompts: bool
    """Leave out prompts that are too long instead of truncating them."""
    train_batch_size: Count
    """Prompts (RL) or samples (SFT) of one iteration, over all ranks."""
    val_batch_size: Annotated[Count | None, MAY_CHANGE]
    """Prompts validated at once, over all ranks. null: all."""
    train_max_samples: Count | None
    """Use only the first so many training samples. null: all."""
    val_max_samples: Annotated[Count | None, MAY_CHANGE]
    """Use only the first so many validation samples. null: all."""
    shuffle: bool
    """Shuffle the training samples anew each epoch."""
    seed: Seed
    """Seed of the shuffle."""
    num_workers: Annotated[Whole, MAY_CHANGE]
    """Loader processes of a rank, capped at the cores of the machine. 0: load in the training
    process.
    """
    prefetch_factor: Annotated[Count, MAY_CHANGE, NO_LOADER_PROCESSES]
    """Batches that each loader process prepares ahead."""
    persistent_workers: Annotated[bool, MAY_CHANGE, NO_LOADER_PROCESSES]
    """Keep the loader processes from one epoch to the next."""
    use_packed_dataset: bool
    """Ragged columns without padding. The only way there is."""
    system_prompt: str | None
    """System message put before every prompt; added to the prompt's own if it has one."""
    chat_template: Annotated[str | None, USER_TEXT]
    """Jinja template that replaces the tokenizer's own, or the path of a file that holds one; the
    run keeps a copy.
    """
    apply_chat_template_kwargs: dict[str, Any]
    """Further arguments of the chat template, such as ``enable_thinking``."""
