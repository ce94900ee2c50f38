"""``ppo_max_token_len_per_gpu=auto``: budgets measured with trial micro-batches at the start."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import torch
from torch import Tensor

from trainer.base.memory import free_device_bytes
from trainer.batching import measured_budget
from trainer.data import Batch
from trainer.models import TokenStats
from trainer.parallel.engine import Engine
from trainer.update.forward import pack_micro_batch
from trainer.update.losses import Objective
from trainer.update.micro_batches import MicroBatchConfig

TRIAL_SEQUENCES = (1, 4)
"""How many of the longest sequences each trial micro-batch holds."""
MOMENT_BYTES = 8
"""AdamW's moments per parameter, in float32; allocated at the first step, after the measurement."""


def measure_budgets(
    engine: Engine,
    objective: Objective[TokenStats] | Objective[Tensor],
    config: MicroBatchConfig,
    *,
    engines: Sequence[Engine],
    longest: int,
    vocabulary: int,
    local_ranks: int,
) -> list[int]:
    """Budgets in tokens, one per rank: a rank with more free memory gets a larger one. Collective.

    ``engines``: all that train in this process, ``engine`` among them: their moments will take
    memory too. ``longest``: tokens of the longest sequence that the run can meet. Raises UserError
    when it does not fit in the free memory of some rank.
    """
    world = engine.world
    trials = []
    for count in TRIAL_SEQUENCES:
        micro = _sequences(count, longest, vocabulary)

        def trial(micro: Batch = micro) -> None:
            packed = pack_micro_batch(micro, config)
            outputs = objective.predict(engine.module, packed, engine.forward)
            if isinstance(outputs, TokenStats):
                outputs = outputs.log_probs
            engine.backward(outputs.sum() * 0.0)

        trials.append((count * longest, peak_bytes(world.device, trial)))
    engine.discard_gradients()
    sharers = 1 if world.device.type == "cuda" else local_ranks
    moments = sum(_moment_bytes(trained) for trained in engines)
    free = free_device_bytes(world.device) // sharers - moments
    budget = measured_budget(trials, max(free, 0), longest=longest)
    return [int(b) for b in world.vector(budget)]


def _moment_bytes(engine: Engine) -> int:
    """Bytes of this rank's moments, which are allocated at the first optimizer step."""
    shards = engine.world.size if engine.settings.zero_stage else 1
    return MOMENT_BYTES * engine.num_trained // shards


def peak_bytes(device: torch.device, work: Callable[[], None]) -> int:
    """Most memory that ``work`` held above what was held before it. On a CPU: of this process, as
    the kernel saw it.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        return torch.cuda.max_memory_allocated(device) - before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    before = psutil.Process().memory_info().rss
    work()
    return max(int(_high_water_bytes() - before), 1)


def _high_water_bytes() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("/proc/self/status has no VmHWM")


def _sequences(count: int, length: int, vocabulary: int) -> Batch:
    ids = [(torch.arange(length) * 7 + k) % vocabulary for k in range(count)]
    mask = torch.arange(length) > 0
    rows = {"prompt_lengths": torch.ones(count, dtype=torch.int64), "groups": torch.arange(count)}
    return Batch.from_sequences({"input_ids": ids, "loss_mask": [mask] * count}, rows)
