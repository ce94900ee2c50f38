"""What vLLM finds around it, and what it must not leave behind in the trainer's process."""

from __future__ import annotations

import gc
import logging
import os
import random
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

FIXED = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    # One sampler for all: its log-probs are taken at the run's temperature.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Threads stay where the system puts them: bound, they would sit on the trainer's cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine runs where it is made, not in a process below it; its log goes where it is sent.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
}
RESTORED = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "TOKENIZERS_PARALLELISM")


@contextmanager
def guest(log: Path | None) -> Iterator[None]:
    """vLLM is imported and loaded inside. Its log goes to ``log`` (None: standard error); random
    numbers, thread count and variables that other processes inherit are afterwards what they were.
    """
    kept = {name: os.environ.get(name) for name in RESTORED}
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    set_num_threads, threads = torch.set_num_threads, torch.get_num_threads()
    os.environ.update(FIXED)
    _log_to(log)
    _let_llvmlite_be_looked_at()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.getLogger("torch._library.triton").setLevel(
                logging.ERROR
            )  # on a CPU it isn't there
            yield
        # vLLM makes many small objects with every token; what was loaded need not be looked through
        # each time.
        gc.collect()
        gc.freeze()
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        for name, value in kept.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def _log_to(path: Path | None) -> None:
    """Let vLLM write to ``path``, for its owner's eyes only, and nowhere else."""
    logger = logging.getLogger("vllm")
    for old in list(logger.handlers):
        logger.removeHandler(old)
        old.close()
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler()
    else:
        path.touch(mode=0o600)
        handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False


def _let_llvmlite_be_looked_at() -> None:
    """vLLM asks every object of every module for its ``__dict__``; numba's compiler library answers
    with a function of that name, at which vLLM falls over.
    """
    module = sys.modules.get("llvmlite.binding.ffi")
    kind: Any = type(getattr(module, "lib", None))
    made = getattr(kind, "__getattr__", None)
    if made is None or hasattr(made, "looked_at"):
        return

    def find(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return made(self, name)

    find.looked_at = True  # type: ignore[attr-defined]
    kind.__getattr__ = find
