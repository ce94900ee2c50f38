"""From the ``data`` section to a data set and its loader."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from trainer.base.data_files import expand
from trainer.base.errors import UserError
from trainer.base.reward_rules import RuleName
from trainer.config.schema import Config, Data
from trainer.data.arithmetic import ArithmeticDataset, ArithmeticSettings
from trainer.data.dataset import Dataset, FileDataset
from trainer.data.encode import Encoder, EncodeSettings
from trainer.data.example import Example
from trainer.data.fields import Keys
from trainer.data.loader import Loader, worker_count

Split = Literal["train", "val"]


def make_datasets(
    config: Config, tokenizer: Any, *, vocabulary: int, local_ranks: int
) -> tuple[Dataset, Dataset | None]:
    """The training data and, if there are any, the validation data of a run.

    ``vocabulary``: the model's number of tokens. Raises UserError for anything wrong with keys or
    files.
    """
    # A user's reward function may do without right answers, and gets them as they are.
    maths_rule = config.custom_reward_function.path is None
    train, val = (
        make_dataset(
            config.data,
            tokenizer,
            split=split,
            mode=config.trainer.mode,
            vocabulary=vocabulary,
            maths_rule=maths_rule,
            rules=config.reward.rules,
            local_ranks=local_ranks,
        )
        for split in get_args(Split)
    )
    if train is None:
        raise AssertionError("make_dataset refuses a run without training data")
    return train, val


def keys_of(config: Config) -> Keys:
    """The fields of a row and who judges its answer, without the response to learn."""
    by_rule = config.custom_reward_function.path is None
    return _keys(config.data, "rl", maths_rule=by_rule, rules=config.reward.rules)


def endless(loader: Loader) -> Iterator[list[Example]]:
    """Batches epoch after epoch: the number of steps ends a run, not the data."""
    while True:
        yield from loader


def make_dataset(
    data: Data,
    tokenizer: Any,
    *,
    split: Split,
    mode: Literal["sft", "rl"],
    vocabulary: int | None = None,
    maths_rule: bool = True,
    rules: Mapping[str, RuleName] | None = None,
    arithmetic: ArithmeticSettings | None = None,
    local_ranks: int = 1,
) -> Dataset | None:
    """The training or validation data; None when validation has none.

    ``vocabulary`` is the model's. With the ``maths_rule`` each row needs a right answer in RL, and
    every right answer must be one that the rule of its data source (``rules``, or the built-in
    one) can compare with; a user's reward function gets what the row has. Raises UserError for
    anything wrong with keys or files.
    """
    encoder = Encoder(tokenizer, _encode_settings(data, vocabulary))
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
    patterns = _patterns(data, split)
    if not patterns:
        return None
    return FileDataset(
        expand(patterns, key),
        _keys(data, mode, maths_rule=maths_rule, rules=rules or {}),
        encoder,
        key=key,
        limit=limit,
        filter_prompts=data.filter_overlong_prompts,
        num_workers=worker_count(data.num_workers, local_ranks),
    )


def _patterns(data: Data, split: Split) -> str | list[str] | None:
    """``data.train_files`` or ``data.val_files``; only the latter may be missing."""
    if split == "val":
        return data.val_files
    if not data.train_files:
        raise UserError(
            "data.train_files is not set; name a file, or type data.task=arithmetic to try "
            "without one"
        )
    return data.train_files


def _encode_settings(data: Data, vocabulary: int | None) -> EncodeSettings:
    return EncodeSettings(
        max_prompt_length=data.max_prompt_length,
        max_response_length=data.max_response_length,
        truncation=data.truncation,
        system_prompt=data.system_prompt,
        chat_template=data.chat_template,
        template_kwargs=dict(data.apply_chat_template_kwargs),
        vocabulary=vocabulary,
    )


def _keys(
    data: Data, mode: Literal["sft", "rl"], *, maths_rule: bool, rules: Mapping[str, RuleName]
) -> Keys:
    return Keys(
        prompt=data.prompt_key,
        response=data.response_key if mode == "sft" else None,
        answer=data.answer_key,
        answer_required=maths_rule and mode == "rl",
        maths_rule=maths_rule,
        rules=rules,
        data_source=data.data_source_key,
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
