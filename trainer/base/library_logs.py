"""Notices of other libraries, kept off the screen, so that what is on it concerns the run."""

from __future__ import annotations

import logging
import os
import warnings
from pathlib import Path


def silence_libraries(device: str) -> None:
    """Call it before torch and DeepSpeed are imported. ``device``: ``trainer.device``."""
    if device == "cpu" or (device == "auto" and not Path("/dev/nvidiactl").exists()):
        # Without it DeepSpeed warns that it found no accelerator.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    for name in ("math_verify", "latex2sympy2_extended"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # DeepSpeed calls collectives by names that torch 2.13 has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
