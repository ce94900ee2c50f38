"""``python -m jobs``: what was launched and how it goes.

``commands`` has one function per command. ``select`` finds the runs that a command names, ``table``
is ``status``, ``watch`` its live form, ``compare``, ``logs``, ``sync`` and ``doctor`` are the
others. States come from ``jobs.evidence`` (what is read) and ``jobs.run_state`` (what follows).
"""
