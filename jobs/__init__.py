"""The login node: plan a sweep, submit it, queue interrupted jobs again, show what runs. No torch.

``hydra_entry`` is what the Hydra launcher calls. ``submit`` turns a sweep into Slurm jobs,
``attempt`` is the batch script's side, ``view`` is ``python -m jobs``. They share ``ledger`` (what
was launched), ``records`` (files of a run folder), ``slurm`` (Slurm's commands), ``evidence`` and
``run_state`` (the state of a run) and ``rank_logs``.
"""
