"""One attempt of a run on Slurm, from the batch script's side. No torch, no call of Slurm.

Read ``batch.sh`` first: the life of an attempt on one screen. ``guard.sh`` comes before it and the
setup lines of site and user, and holds what is done when no attempt can begin. ``batch.sh`` calls
``python -m jobs.attempt begin``, the node check ``health.sh``, srun, and ``python -m jobs.attempt
end``, which prints whether the job is queued again. ``bookkeeping`` writes the records of an
attempt, ``evidence`` collects what is known about its end, ``causes`` tells why it ended,
``decision`` what follows.
"""
