"""Runs the start-up self-test on sound and on broken engines; prints each verdict as JSON."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

from trainer.base import environment, rank_info

environment.prepare(1)

from trainer.parallel import deepspeed_setup, engine, selftest  # noqa: E402
from trainer.ranks.world import join, leave  # noqa: E402


def settings(zero: int) -> deepspeed_setup.EngineSettings:
    return deepspeed_setup.EngineSettings(
        zero_stage=zero, bf16=False, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0
    )


def without_key(settings: deepspeed_setup.EngineSettings) -> dict[str, Any]:
    config = sound_config(settings)
    del config["managed_gradient_accumulation"]
    return config


def past_deepspeed(self: engine.Engine, *args: Any, **kwargs: Any) -> Any:
    self._awaits_backward = True
    return self.module(*args, **kwargs)


def averaged(self: engine.Engine, loss: Any) -> None:
    self._awaits_backward = False
    self.ds.backward(loss * self.world.size / 3, scale_wrt_gas=False)


sound_config = deepspeed_setup.ds_config
MUTANTS = {
    "key dropped": lambda: patch.object(deepspeed_setup, "ds_config", without_key),
    "past DeepSpeed": lambda: patch.object(engine.Engine, "forward", past_deepspeed),
    "averaged": lambda: patch.object(engine.Engine, "backward", averaged),
}


def verdict(zero: int) -> str:
    try:
        return f"{selftest.run(settings(zero), world):.1e}"
    except RuntimeError as error:
        return str(error)


if __name__ == "__main__":
    world = join(
        rank_info.rank_from_environment({}),
        device="cpu",
        run_dir=Path(sys.argv[1]),
        meet_s=400,
        timeout_s=400,
    )
    verdicts = {f"sound {zero}": verdict(zero) for zero in range(4)}
    for name, mutate in MUTANTS.items():
        for zero in range(4):
            with mutate():
                verdicts[f"{name} {zero}"] = verdict(zero)
    leave()
    sys.stdout.write("\n" + json.dumps(verdicts) + "\n")
