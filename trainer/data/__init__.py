"""Data: readers, sample checks, a resumable loader and the ragged batch."""

from __future__ import annotations

from trainer.data.arithmetic import ArithmeticDataset, ArithmeticSettings
from trainer.data.batch import Batch
from trainer.data.build import make_dataset, make_loader
from trainer.data.collate import to_sft_batch
from trainer.data.data_check import require_sound
from trainer.data.dataset import Dataset, FileDataset, Fingerprint, require_distinct
from trainer.data.encode import Encoder, EncodeSettings
from trainer.data.example import Example
from trainer.data.fields import Keys
from trainer.data.loader import Loader, worker_count
from trainer.data.order import Position

__all__ = [
    "ArithmeticDataset",
    "ArithmeticSettings",
    "Batch",
    "Dataset",
    "EncodeSettings",
    "Encoder",
    "Example",
    "FileDataset",
    "Fingerprint",
    "Keys",
    "Loader",
    "Position",
    "make_dataset",
    "make_loader",
    "require_distinct",
    "require_sound",
    "to_sft_batch",
    "worker_count",
]
