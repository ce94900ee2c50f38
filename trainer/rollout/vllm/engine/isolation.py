"""The environment in which vLLM is loaded, and the repair of what it changes in the process."""

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

VLLM_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_DO_NOT_TRACK": "1",
    "DO_NOT_TRACK": "1",
    # The sampler is installed in the V1 model runner.
    "VLLM_USE_V2_MODEL_RUNNER": "0",
    # Threads stay where the system puts them: bound, they would share the trainer's cores.
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # The engine runs in the process that makes it; its log goes to the file chosen below.
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CONFIGURE_LOGGING": "0",
}
RESTORED_VARIABLES = ("LD_PRELOAD", "LOCAL_WORLD_SIZE", "TOKENIZERS_PARALLELISM")


@contextmanager
def isolated_vllm(log: Path | None) -> Iterator[None]:
    """Context in which vLLM is imported and loaded.

    vLLM logs to ``log`` (None: standard error). On exit the random number generators, the thread
    count and variables that other processes inherit are what they were before.
    """
    environment = {name: os.environ.get(name) for name in RESTORED_VARIABLES}
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    torch_state = torch.get_rng_state()
    set_num_threads = torch.set_num_threads
    threads = torch.get_num_threads()
    os.environ.update(VLLM_ENVIRONMENT)
    _log_to(log)
    _fix_llvmlite_dict()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            # It warns on a CPU, where there is no Triton.
            logging.getLogger("torch._library.triton").setLevel(logging.ERROR)
            yield
        # vLLM makes many small objects with every token; freezing what is loaded keeps the garbage
        # collector from going through it each time.
        gc.collect()
        gc.freeze()
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(threads)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        _restore(environment)


def _restore(environment: dict[str, str | None]) -> None:
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def _log_to(path: Path | None) -> None:
    """Let vLLM log to ``path``, which only its owner can read, and nowhere else."""
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


def _fix_llvmlite_dict() -> None:
    """Let the ``__dict__`` of llvmlite's library object raise AttributeError.

    vLLM reads ``__dict__`` of every object of every module; numba's compiler library answers with a
    function of that name, and vLLM crashes.
    """
    module = sys.modules.get("llvmlite.binding.ffi")
    library_class: Any = type(getattr(module, "lib", None))
    original = getattr(library_class, "__getattr__", None)
    if original is None or hasattr(original, "without_dict"):
        return

    def get_attribute(self: Any, name: str) -> Any:
        if name == "__dict__":
            raise AttributeError(name)
        return original(self, name)

    get_attribute.without_dict = True  # type: ignore[attr-defined]
    library_class.__getattr__ = get_attribute
