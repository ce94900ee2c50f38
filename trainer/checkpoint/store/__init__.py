"""Committed checkpoints on disk: how one gets there, is verified, kept and removed. No torch.

Read in this order:
``layout`` the names in the folder of checkpoints; ``commit`` the commit protocol, on one screen;
``manifest`` the list of files and checksums that makes a folder a checkpoint; ``disk`` every
operation on the file system, and ``file_writing`` how a file is written; ``cleanup`` leftovers,
damaged and superseded folders; ``retention`` which checkpoints stay; ``mirror`` the copy at a
second location; ``lease`` one job per run folder; ``commit_store`` how the ranks' committers
exchange messages (the only file with torch).
"""
