"""One attempt of a run on Slurm, from the batch script's side. No torch, no call of Slurm.

Read ``batch.sh`` first: the life of an attempt on one screen. It calls ``python -m jobs.attempt
begin``, the node check ``health.sh``, srun, and ``python -m jobs.attempt end``, which prints
whether the job is queued again. ``bookkeeping`` writes the records of an attempt, ``causes``
decides why it ended and what follows.
"""
