"""Data: from the ``data`` section to samples as tokens, in an order that a resumed run repeats.

Read ``build`` first: from the settings to a data set and its loader. ``fields`` turns a file's row
into a ``DataRow`` (``messages`` reads chats, ``truth`` right answers), ``encode`` turns that into
tokens and checks them (``chat_template``, ``rendering`` and ``conversation`` write turns,
``truncate`` cuts),
``dataset`` numbers the rows of several files and ``arithmetic`` makes up sums. ``loader`` yields
batches in the order of ``order``; ``collate`` and ``batch`` make them ragged arrays; ``data_check``
refuses samples that can't be trained on, and ``first_truths`` reads the answers that the rules are
tried on.

Every failure is a UserError that names file, row, field and what to type.
"""

from __future__ import annotations

from trainer.data.arithmetic import ArithmeticDataset, ArithmeticSettings
from trainer.data.batch import Batch
from trainer.data.build import endless, make_dataset, make_datasets, make_loader
from trainer.data.collate import to_sft_batch
from trainer.data.data_check import check_samples
from trainer.data.dataset import Dataset, FileDataset, Fingerprint, same_data_warning
from trainer.data.encode import Encoder, EncodeSettings
from trainer.data.example import Example
from trainer.data.fields import Keys
from trainer.data.first_truths import SourceTruth, first_truths
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
    "SourceTruth",
    "check_samples",
    "endless",
    "first_truths",
    "make_dataset",
    "make_datasets",
    "make_loader",
    "same_data_warning",
    "to_sft_batch",
    "worker_count",
]
