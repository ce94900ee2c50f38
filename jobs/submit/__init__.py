"""From the points of a sweep to Slurm jobs, or to runs on this machine.

Read in the order of a submission: ``launch`` (points to checked jobs), ``plan`` (which jobs, in
which arrays), ``preflight`` (what would fail in the queue), ``freeze`` (run folders), ``script``
and ``runtime`` (the batch script and what starts a rank), ``submit`` with ``executor`` and
``payload`` (sbatch through Submitit). ``options``, ``cluster_config`` and ``shape`` are the
settings, ``snapshot`` and ``signature`` identify code and configs, ``report`` is the text.
``local`` runs a sweep here, ``resubmit`` submits ended runs again.
"""
