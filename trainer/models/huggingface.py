"""A model as a folder that transformers and vLLM read."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from transformers import PreTrainedTokenizerBase
from transformers.utils import logging

from trainer.models.lora import has_adapters, weights, write_adapter

ADAPTER = "adapter"
"""Folder inside the model's folder for LoRA adapters. Not the model's folder itself: transformers
would add the adapter to weights that contain it already.
"""


def write_folder(model: torch.nn.Module, tokenizer: PreTrainedTokenizerBase, out: Path) -> None:
    """Write weights, config and tokenizer to ``out``, which appears whole and replaces an old one.

    LoRA adapters are merged into the weights, and also written to ``out/adapter``.
    """
    temp = out.with_name(f".{out.name}.tmp")
    for old in (temp, out):
        if old.exists():
            shutil.rmtree(old)
    temp.mkdir(mode=0o700, parents=True)
    state = None
    if has_adapters(model):
        state = {weight.name: weight.merged() for weight in weights(model)}
        write_adapter(model, temp / ADAPTER)
    with no_progress_bars():
        model.save_pretrained(temp, state_dict=state)  # type: ignore[operator]
        tokenizer.save_pretrained(temp)
    temp.rename(out)


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Switch off transformers' progress bars: the run shows its own progress line."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@contextmanager
def no_load_reports() -> Iterator[None]:
    """Switch off transformers' progress bars and its tables of missing weights, which the caller
    judges itself.
    """
    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with no_progress_bars():
            yield
    finally:
        logging.set_verbosity(level)
