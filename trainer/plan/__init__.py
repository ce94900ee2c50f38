"""``python -m trainer.plan``: what a run would need, before any GPU is touched. Imports no torch
unless a built-in model has to be made first.
"""

from __future__ import annotations
