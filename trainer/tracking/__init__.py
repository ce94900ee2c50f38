"""What a run records and shows: metrics, timers, W&B, progress, hints, pictures, goodput.

Read ``tracker`` first (one object that takes the metrics of each step), then its outputs:
``console`` with ``console_text``, ``wandb_run`` and ``health`` (hints). ``timers`` and ``perf``
measure a step, ``goodput`` a run over its attempts; ``monitor`` and ``visualizer`` (which draws
with ``batch_plots``) show its micro-batches. ``pictures`` and ``rebuild`` read the record of a run,
``banner`` describes its environment. ``plotting`` holds what all pictures share.

``loggers`` holds all other loggers, each of which is one file there.
"""

from trainer.tracking.timers import Timers
from trainer.tracking.tracker import Tracker

__all__ = ["Timers", "Tracker"]
