"""``python -m trainer.plan``: what a run would need, before any GPU is touched.

Read ``__main__.py``, then ``report.py`` and its sections; ``memory.py`` predicts bytes,
``lengths.py`` measures the data, ``options.py`` parses ``plan.*``. Imports no torch unless a
built-in model has to be made first.
"""

from __future__ import annotations
