"""Checkpoints that survive a crash at any instant: saved in the background, verified at restore.

Read in this order:

- ``checkpointer``: save and restore, seen from the training loop
- ``snapshot/``: what a rank saves, laid out in host memory
- ``writer/``: the process that writes it to disk
- ``committer``: the thread that brings a save to its commit; a save that fails is counted and
  logged there, and the next one is tried
- ``store/``: the commit protocol (``store/commit.py``) and the checkpoints on disk
- ``resume``: which checkpoint a run resumes from; ``diagnose``: what a folder is instead of one
- ``reader``, ``restore``: from a checkpoint into an engine
- ``schedule`` (when to save), ``settings``, ``metrics``
"""
