from __future__ import annotations

import pytest
import torch

from trainer.tracking.perf import (
    memory_metrics,
    micro_batch_metrics,
    peak_flops,
    throughput_metrics,
    train_flops,
)


def test_throughput_is_per_device() -> None:
    metrics = throughput_metrics(1000, 2.0, 4, flops=8e12, peak=1e13)
    assert metrics["perf/throughput"] == 125.0 and metrics["perf/tokens_per_second"] == 500.0
    assert metrics["perf/mfu/actor"] == pytest.approx(0.1)
    assert throughput_metrics(1000, 2.0, 4, flops=8e12, peak=1e13, update_s=0.5)[
        "perf/mfu/actor"
    ] == pytest.approx(0.4)
    assert "perf/mfu/actor" not in throughput_metrics(1000, 2.0, 4, flops=8e12)


def test_flops_follow_the_lengths_not_the_padding() -> None:
    assert train_flops(10, 2, 3, [1, 2]) == 6 * 10 * 3 + 6 * 2 * 3 * 5
    assert train_flops(10, 2, 3, [1, 2], trained=1) == (4 * 10 + 2) * 3 + 6 * 2 * 3 * 5
    assert train_flops(10, 2, 3, [4, 4]) < train_flops(10, 2, 3, [8])


def test_fillers_do_not_count_as_micro_batches() -> None:
    assert micro_batch_metrics([100, 0, 300], 512) == {
        "batch/micro_batch_tokens/mean": 200.0,
        "batch/micro_batch_tokens/min": 100.0,
        "batch/micro_batch_tokens/max": 300.0,
        "batch/budget": 512.0,
    }
    assert micro_batch_metrics([0], 512) == {}


def test_resident_memory_is_of_this_process() -> None:
    used = memory_metrics(torch.device("cpu"))["perf/cpu_memory_used_gb"]
    assert 0.05 < used < 50
    assert peak_flops(torch.device("cpu")) is None


@pytest.mark.parametrize(
    ("name", "peak"), [("NVIDIA H100 PCIe", 756e12), ("NVIDIA H200", 989e12), ("Card X", None)]
)
def test_the_peak_is_that_of_the_named_card(
    name: str, peak: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: name)
    assert peak_flops(torch.device("cuda")) == peak
