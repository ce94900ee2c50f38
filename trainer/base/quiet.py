"""Other libraries' chatter, kept off the screen: what is left on it speaks of the run."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path


def before_imports(device: str) -> None:
    """Call before torch and DeepSpeed are imported. ``device``: ``trainer.device``."""
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists()):
        os.environ.setdefault(
            "DS_ACCELERATOR", "cpu"
        )  # else DeepSpeed warns that it found no accelerator
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch 2.13 calls old.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
