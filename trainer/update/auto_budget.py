"""``ppo_max_token_len_per_gpu=auto``: this rank's budget, from trial micro-batches and the memory
it has free.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import psutil
import torch

from trainer.batching import measured_budget
from trainer.data import Batch
from trainer.parallel.engine import Engine
from trainer.update.forward import run_micro_batch
from trainer.update.micro_batches import Stowage

PROBES = (1, 4)
"""Trial micro-batches hold so many of the longest sequences."""
MOMENT_BYTES = 8
"""Of AdamW per parameter, in float32; they come into being at the first step, after the
measurement.
"""


def measure_budgets(
    engine: Engine, stowage: Stowage, *, longest: int, vocabulary: int, local_ranks: int
) -> list[int]:
    """Tokens of each rank's micro-batches. A rank with a bigger card, or an emptier one, takes
    more.

    ``longest``: tokens of the longest sequence that the run can meet. Collective. Raises UserError
    when not even that fits in the free memory of some rank.
    """
    world = engine.world
    probes = []
    for count in PROBES:
        micro = _sequences(count, longest, vocabulary)

        def trial(micro: Batch = micro) -> None:
            _, stats = run_micro_batch(
                engine.module, micro, stowage, temperature=1.0, entropy=True, forward=engine.forward
            )
            engine.backward(stats.log_probs.sum() * 0.0)

        probes.append((count * longest, peak_bytes(world.device, trial)))
    engine.discard()
    reserve = MOMENT_BYTES * engine.trained // (world.size if engine.settings.zero_stage else 1)
    free = free_bytes(world.device) // (1 if world.device.type == "cuda" else local_ranks) - reserve
    mine = measured_budget(probes, max(free, 0), longest=longest)
    return [int(budget) for budget in world.vector(mine)]


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


def free_bytes(device: torch.device) -> int:
    """Memory that this device can still give, cached blocks of this process included."""
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


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
