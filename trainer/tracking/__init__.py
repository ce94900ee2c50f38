"""What a run shows and keeps of itself: metrics, timers, W&B, progress, pictures, health."""

from trainer.tracking.timers import Timers
from trainer.tracking.tracker import Tracker

__all__ = ["Timers", "Tracker"]
